"""`swarm-node appeal`: ask the operator to review what a fault or a ban took.

- The node's key signs, or the owner's, which also works for a node whose key is lost or revoked.
- Only a digest of the reason goes into the public log; the operator reads the text.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protocol.errors import ConfigInvalid, MalformedMessage
from swarm_node.commands.keys import PassphraseFd, PassphraseFile, unlocked
from swarm_node.commands.options import DEFAULT_HOME, JoinText

if TYPE_CHECKING:
    from protocol.work.appeal import AppealReply

EXIT_CODES = "Exit codes: 0 recorded, now or before; 1 failed or nothing was taken, 2 wrong usage."


def appeal(
    join_string: JoinText = "",
    lease: Annotated[
        str, typer.Argument(metavar="LEASE", help="The lease or claim; `swarm-node why` lists them.")
    ] = "",
    reason: Annotated[str, typer.Option(help="What the operator should know; the evidence they have.")] = "",
    home: Annotated[Path, typer.Option(help="The node's folder, whose key signs.")] = DEFAULT_HOME,
    owner_key: Annotated[Path | None, typer.Option(help="Sign with this owner's key in place of the node's.")] = None,
    passphrase_file: PassphraseFile = None,
    passphrase_fd: PassphraseFd = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Appeal against what a fault or a ban took from this node: once, for all that it took; the operator rules."""
    import trio

    from protocol.work.appeal import Appeal, seal_appeal
    from swarm_node.commands.why import round_of_lease
    from swarm_node.coordinator_api import last_round
    from swarm_node.coordinator_api.client import Coordinator
    from swarm_node.keys import identity

    join_string, lease = last_round.with_round(join_string, lease)
    if not lease:
        raise ConfigInvalid("The command needs a lease.", hint="Run `swarm-node why` to list the last leases.")
    joins = last_round.all_chosen(join_string, home)
    key = unlocked(owner_key, passphrase_file, passphrase_fd) if owner_key else identity.find_identity(home).key
    join, lease = round_of_lease(joins, home, lease)
    try:
        said = Appeal.from_value({"kind": "appeal", "round_id": join.round_id, "about": lease, "reason": reason})
    except MalformedMessage as error:
        raise ConfigInvalid(error.message) from None

    async def send() -> "AppealReply":
        coordinator = Coordinator(join.url, join.round_id, key)
        try:
            return await coordinator.appeal(seal_appeal(key, said))
        finally:
            await coordinator.close()

    show(trio.run(send), as_json=as_json)


def show(reply: "AppealReply", *, as_json: bool) -> None:
    """Print the state of an appeal; the ruling is the operator's text."""
    from protocol.text.plain import one_line

    if as_json:
        typer.echo(json.dumps(reply.model_dump()))
        return
    ruling = f", {reply.standing}: {reply.ruling}" if reply.ruling else ", and waits for the operator's ruling"
    typer.echo(one_line(f"{reply.outcome}: appeal {reply.number} about claim {reply.claim_id}{ruling}"))
