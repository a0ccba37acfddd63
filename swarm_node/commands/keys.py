"""`swarm-node keys` and `swarm-node earnings`: the node's key, the owner's key, and their earnings.

- The node's key is in the home, unencrypted, and can only work. The owner's key is elsewhere, encrypted, and is needed
  to delegate to a node, to revoke a node, and to set the payout address.
- Everything the owner signs is a statement (`protocol.people.owner`) and may be repeated.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protocol.errors import ConfigInvalid, MalformedMessage, SwarmError, named
from protocol.text.commands import lesson
from protocol.text.money import CREDITS, Unit, pace_text
from protocol.text.plain import counted
from swarm_node.base.clock import now_ms
from swarm_node.commands.options import DEFAULT_HOME, AsJson, Home, HomeOfRound, JoinText, WholeSentences

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from protocol.people.owner import Earnings, NodeEarnings, Statement, StatementReply
    from protocol.wire.signing import NodeKey
    from swarm_node.coordinator_api.client import Coordinator
    from swarm_node.coordinator_api.join_string import JoinString
    from swarm_node.ledger.notices import OwnerRates

app = typer.Typer(
    cls=WholeSentences, help="Manage the node's key and the owner's key.", no_args_is_help=True, add_completion=False
)
owner_app = typer.Typer(
    cls=WholeSentences, help="Manage the owner's key (encrypted).", no_args_is_help=True, add_completion=False
)
app.add_typer(owner_app, name="owner")

DEFAULT_OWNER_KEY = Path.home() / ".config" / "echo-swarm" / "owner.key"

NodeText = Annotated[str, typer.Argument(metavar="NODE", help="The node's id; `keys show` on that machine prints it.")]
OwnerKey = Annotated[Path, typer.Option(help="File of the owner's key.")]
PassphraseFile = Annotated[Path | None, typer.Option(help="Read the passphrase from this file's first line.")]
PassphraseFd = Annotated[int | None, typer.Option(min=0, help="Read the passphrase from this file descriptor.")]
EXIT_CODES = "Exit codes: 0 done, 1 failed, 2 wrong usage."


@app.command(epilog=lesson("swarm-node keys show", "make a backup with `keys backup`.", EXIT_CODES))
def show(home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Show the node's id and its owner. Needs no passphrase."""
    from swarm_node.keys import delegation, identity

    path, me = home / identity.FILE, identity.find_identity(home).key.node_id
    data = delegation.kept(home, me)
    owner = delegation.owner_of(data, me)[0] if data else None
    private = path.stat().st_mode & 0o077 == 0
    if as_json:
        typer.echo(json.dumps({"node_id": me, "owner": owner, "file": str(path), "private": private}))
        return
    typer.echo(f"node {me}\nowner {owner or 'none (the node earns for itself)'}")
    typer.echo(f"{path}{'' if private else ' CAN BE READ BY OTHERS: chmod 600'}")


@app.command(
    epilog=lesson(
        "swarm-node keys rotate", "the owner runs the printed commands; then start the agent again.", EXIT_CODES
    )
)
def rotate(
    home: Home = DEFAULT_HOME,
    drop_unsent: Annotated[
        bool, typer.Option("--drop-unsent", help="Rotate even if finished work is not sent yet; that work is lost.")
    ] = False,
    keep_history: Annotated[
        bool,
        typer.Option(
            "--keep-history", help="The new key earns for the old key. Do not use this if the old key may be stolen."
        ),
    ] = False,
) -> None:
    """Replace this node's key; the old key is kept. Then delegate the new key and revoke the old one.

    Stop the agent first. The old key, with its claims and receipts, moves to `old-…` in the home; chunks and
    versions stay. Do not use --keep-history if the old key may be stolen: its thief would be the owner. If a
    rotation is interrupted, run the command again.
    """
    from swarm_node.keys import identity

    old, new = identity.rotate(home, drop_unsent=drop_unsent, keep_history=keep_history, number=now_ms())
    typer.echo(f"The node id changed from {old} to {new}.")
    if keep_history:
        aside = home / f"old-{old[-8:]}"
        typer.echo(f"It earns for its old key, which is saved in {aside}; trust and earnings are kept.")
        return
    typer.echo(f"The owner now runs `swarm-node keys delegate {new}` and `swarm-node keys revoke {old} JOIN_STRING`.")


@app.command(
    "backup",
    epilog=lesson(
        "swarm-node keys backup /media/stick/node.key",
        "store the passphrase elsewhere; `keys restore` restores the key.",
        EXIT_CODES,
    ),
)
def backup_node(
    target: Annotated[Path, typer.Argument(metavar="FILE", help="Path of the new backup file, on another disk.")],
    home: Home = DEFAULT_HOME,
    passphrase_file: PassphraseFile = None,
    passphrase_fd: PassphraseFd = None,
) -> None:
    """Write the node's key to a file, encrypted with a passphrase, and check that it can be decrypted."""
    from swarm_node.keys import identity
    from swarm_node.keys import owner_key as keys

    me = identity.find_identity(home)
    keys.require_new(target)
    words = keys.passphrase(passphrase_file, passphrase_fd, twice=True)
    keys.write(target, me.seed, words, keys.NODE)
    keys.unlock(target, words, keys.NODE)
    typer.echo(f"node {me.key.node_id}\n{target}")


@app.command(
    "restore",
    epilog=lesson(
        "swarm-node keys restore /media/stick/node.key", "`swarm-node join` continues as the same node.", EXIT_CODES
    ),
)
def restore_node(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="A backup of a node's key.")],
    home: Home = DEFAULT_HOME,
    passphrase_file: PassphraseFile = None,
    passphrase_fd: PassphraseFd = None,
) -> None:
    """Restore a node's key into a home without a key. Never use one key on two machines."""
    from swarm_node.keys import identity
    from swarm_node.keys import owner_key as keys

    path = home / identity.FILE
    keys.require_new(path)
    node = keys.read(source, keys.NODE).owner
    identity.put(path, keys.unlock(source, keys.passphrase(passphrase_file, passphrase_fd), keys.NODE))
    typer.echo(f"node {node}\n{path}")


@app.command(
    epilog=lesson(
        "swarm-node keys delegate NODE_ID --out delegation",
        "copy the file to that machine and run `swarm-node join JOIN_STRING --owner delegation`.",
        EXIT_CODES,
    )
)
def delegate(
    node_id: NodeText,
    out: Annotated[
        Path | None, typer.Option(help="Output file; by default delegation-… in the current folder.")
    ] = None,
    owner_key: OwnerKey = DEFAULT_OWNER_KEY,
    passphrase_file: PassphraseFile = None,
    passphrase_fd: PassphraseFd = None,
) -> None:
    """Sign a delegation to a node. Copy the file to the node: `swarm-node join … --owner FILE`.

    The file is valid in every round. A node has one owner permanently; its earlier earnings go to the owner, too.
    """
    from protocol.people.owner import Delegation, seal_statement
    from swarm_node.base.disk import write_durably

    said = _typed(Delegation, node_id=node_id, number=now_ms())
    target = out or Path(f"delegation-{node_id[-8:]}")
    data = seal_statement(unlocked(owner_key, passphrase_file, passphrase_fd), said)
    write_durably(target, data, temp_folder=target.parent)
    typer.echo(str(target))


@app.command(
    epilog=lesson(
        "swarm-node keys revoke NODE_ID JOIN_STRING",
        "repeat it for every round in which that node worked; `keys rotate` on that machine makes a new key.",
        EXIT_CODES,
    )
)
def revoke(
    node_id: NodeText,
    join_string: JoinText = "",
    home: HomeOfRound = DEFAULT_HOME,
    owner_key: OwnerKey = DEFAULT_OWNER_KEY,
    passphrase_file: PassphraseFile = None,
    passphrase_fd: PassphraseFd = None,
) -> None:
    """Revoke a node's key permanently; its earnings stay yours.

    The node gets no more work in this round and cannot send any.
    """
    from protocol.people.owner import Revocation
    from swarm_node.coordinator_api import last_round

    said = _typed(Revocation, node_id=node_id, number=now_ms())
    reply = _state(last_round.chosen(join_string, home), unlocked(owner_key, passphrase_file, passphrase_fd), said)
    typer.echo(f"{reply.outcome}: the key of {node_id} is revoked.")


@app.command(
    epilog=lesson(
        "swarm-node keys address evm:0x52908400098527886E0F7030069857D2E4169EE7",
        "`swarm-node earnings` shows the address and the time from which it applies.",
        EXIT_CODES,
    )
)
def address(
    join_string: JoinText = "",
    where: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS",
            help="Payout address as the round requires: evm:, sepa:, paypal:, stripe:, lightning: or text:.",
        ),
    ] = "",
    home: HomeOfRound = DEFAULT_HOME,
    owner_key: OwnerKey = DEFAULT_OWNER_KEY,
    passphrase_file: PassphraseFile = None,
    passphrase_fd: PassphraseFd = None,
) -> None:
    """Set the payout address of a round. It applies after a delay; until then the old address applies.

    The address is evm:0x…, sepa:IBAN/name, paypal:EMAIL, stripe:acct_…, lightning:… (name@host, an LNURL or a BOLT12
    offer) or text:… (payment by hand). It is checked before it is signed. Signing again restarts the
    delay, which is 72 hours unless the operator changed it. An owner may do so 4 times a day, and more often with
    validated work.
    """
    from protocol.people.owner import PayoutAddress
    from protocol.people.payout_addresses import EXAMPLES, checked_address
    from swarm_node.coordinator_api import last_round
    from swarm_node.ledger.notices import day

    join_string, where = last_round.with_round(join_string, where)
    if not where:
        raise ConfigInvalid(
            "The command needs a payout address.",
            hint=f"Give one that the round pays to, such as {EXAMPLES['sepa']!r} or {EXAMPLES['evm']}.",
        )
    try:
        checked_address(where)
    except ValueError as error:
        scheme = where.partition(":")[0]
        hint = f"For example {EXAMPLES.get(scheme, EXAMPLES['sepa'])!r}; see `swarm-node keys address --help`."
        raise ConfigInvalid(f"The payout address is not valid: {error}.", hint=hint) from None
    join = last_round.chosen(join_string, home)
    said = _typed(PayoutAddress, round_id=join.round_id, address=where, number=now_ms())
    reply = _state(join, unlocked(owner_key, passphrase_file, passphrase_fd), said)
    typer.echo(f"{reply.outcome}: {where} applies from {day(reply.counts_from_ms)}.")


@owner_app.command(
    epilog=lesson(
        "swarm-node keys owner new",
        "make a backup with `keys owner backup`; then run `keys delegate` for each of your nodes.",
        EXIT_CODES,
    )
)
def new(
    owner_key: OwnerKey = DEFAULT_OWNER_KEY, passphrase_file: PassphraseFile = None, passphrase_fd: PassphraseFd = None
) -> None:
    """Create an owner's key. Make a backup: without the key you can never change an address again."""
    from swarm_node.keys import owner_key as keys

    made = keys.create(owner_key, keys.passphrase(passphrase_file, passphrase_fd, twice=True))
    typer.echo(f"owner {made.node_id}\n{owner_key}")


@owner_app.command(
    "show", epilog=lesson("swarm-node keys owner show", "`keys delegate` makes a node work for this owner.", EXIT_CODES)
)
def show_owner(owner_key: OwnerKey = DEFAULT_OWNER_KEY) -> None:
    """Show the owner of a key file. Needs no passphrase."""
    from swarm_node.keys import owner_key as keys

    typer.echo(f"owner {keys.read(owner_key).owner}\n{owner_key}")


@owner_app.command(
    epilog=lesson(
        "swarm-node keys owner backup /media/stick/owner.key",
        "store the passphrase elsewhere; `keys owner restore` restores the key.",
        EXIT_CODES,
    )
)
def backup(
    target: Annotated[Path, typer.Argument(metavar="FILE", help="Path of the new backup file, on another disk.")],
    owner_key: OwnerKey = DEFAULT_OWNER_KEY,
    passphrase_file: PassphraseFile = None,
    passphrase_fd: PassphraseFd = None,
) -> None:
    """Write a copy, encrypted again with the same passphrase, and check that it can be decrypted."""
    _copy(owner_key, target, passphrase_file, passphrase_fd)


@owner_app.command(
    epilog=lesson(
        "swarm-node keys owner restore /media/stick/owner.key", "`keys owner show` shows the owner's id.", EXIT_CODES
    )
)
def restore(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="A backup.")],
    owner_key: OwnerKey = DEFAULT_OWNER_KEY,
    passphrase_file: PassphraseFile = None,
    passphrase_fd: PassphraseFd = None,
) -> None:
    """Restore a backup, if there is no owner's key yet."""
    _copy(source, owner_key, passphrase_file, passphrase_fd)


def earnings(join_string: JoinText = "", home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Show what this node and the owner's other nodes have earned, what was paid, and the payout address.

    Without a join string it shows each round that the node joined last; with --json, one line for each.
    """
    import trio

    from swarm_node.coordinator_api import last_round

    joins = last_round.all_chosen(join_string, home)
    failed: SwarmError | None = None
    shown: list[tuple[NodeEarnings, Unit]] = []
    for join in joins:
        try:
            summary, rates, unit, finished = trio.run(_earnings, join, home)
        except SwarmError as error:
            if len(joins) == 1:
                raise
            typer.echo(f"{join.url}: {named(error)}", err=True)
            failed = error
            continue
        if len(joins) > 1 and not as_json:
            typer.echo(f"{join.url}:")
        show_earnings(summary, rates, unit, finished=finished, as_json=as_json)
        shown.append((summary.total, unit))
    if not as_json and (totals := list(total_lines(shown))):
        typer.echo("\n".join(totals))
    if failed is not None:
        raise typer.Exit(1)


def total_lines(totals: "Sequence[tuple[NodeEarnings, Unit]]") -> "Iterator[str]":
    """Yield the owner's total over several rounds, a line for each unit: amounts of different units are not added.

    Credits have no total: each operator decides what its own are worth.
    """
    if len(totals) < 2:
        return
    for name in dict.fromkeys(unit.name for _, unit in totals):
        if name == CREDITS.name:
            continue
        rows = [(row, unit) for row, unit in totals if unit.name == name]
        unit = max((unit for _, unit in rows), key=lambda unit: unit.decimals)
        amounts = {
            "pending": sum(row.pending_micros for row, _ in rows),
            "payable": sum(row.payable_micros for row, _ in rows),
            "being paid": sum(row.paying_micros for row, _ in rows),
            "paid": sum(row.paid_micros for row, _ in rows),
        }
        said = ", ".join(f"{unit.amount(micros)} {state}" for state, micros in amounts.items())
        yield f"total of {counted(len(rows), 'round')}: {said}"


EARNINGS_COLUMNS = ("node", "pending", "payable", "being paid", "paid", "last hour", "last day")


def aligned(rows: "Sequence[Sequence[str]]") -> "Iterator[str]":
    """Yield rows of cells as lines: the first column begins at the left, the others end at the right.

    The lines have no limit: a pipe has no width, and a terminal that is too narrow wraps them.
    """
    first, *others = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        yield "  ".join((name.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, others, strict=True))))


def show_earnings(
    summary: "Earnings",
    rates: "OwnerRates | None",
    unit: Unit,
    *,
    finished: bool = False,
    as_json: bool = False,
) -> None:
    """Print earnings as a table or as JSON; names are untrusted text. A `finished` round has no rate."""
    if as_json:
        by_node = {node_id: pace._asdict() for node_id, pace in rates.nodes.items()} if rates else {}
        more = {"unit": unit.to_json(), "rates": rates.to_json() | {"nodes": by_node} if rates else None}
        typer.echo(json.dumps(summary.model_dump() | more))
        return
    from protocol.text.plain import one_line
    from swarm_node.ledger.notices import day
    from swarm_node.owner.status_lines import payout_lines

    table: list[Sequence[str]] = [EARNINGS_COLUMNS]
    for row in (*summary.nodes, summary.total) if len(summary.nodes) != 1 else summary.nodes:
        name = f"{row.name or 'all nodes'}{' (revoked)' if row.revoked else ''}"
        amounts = (row.pending_micros, row.payable_micros, row.paying_micros, row.paid_micros)
        pace = None if rates is None else rates.total if row is summary.total else rates.nodes.get(row.node_id)
        lately = (unit.figure(pace.hour_micros), unit.figure(pace.day_micros)) if pace else ("?", "?")
        table.append((one_line(name), *map(unit.figure, amounts), *lately))
    typer.echo(f"amounts in {unit.name}")
    typer.echo("\n".join(aligned(table)))
    if rates is None:
        typer.echo("rate: not known; the coordinator does not report it")
    else:
        typer.echo(f"rate: {pace_text(unit, rates.total, finished=finished)}")
        typer.echo("\n".join(payout_lines(unit, rates.to_json(), now_ms=now_ms())))
    typer.echo(f"owner {summary.owner}")
    nowhere = "no address yet: the owner sets one with `swarm-node keys address`"
    typer.echo(f"paid to {one_line(summary.address) or nowhere}")
    if summary.next_address:
        typer.echo(f"CHANGES to {one_line(summary.next_address)} on {day(summary.next_from_ms)}")


def _typed(kind: "type[Statement]", **fields: str | int) -> "Statement":
    """Build a statement from typed values; raise `ConfigInvalid` for a wrong id or address."""
    try:
        return kind.from_value({"kind": kind.model_fields["kind"].default, **fields})
    except MalformedMessage as error:
        raise ConfigInvalid(error.message) from None


def unlocked(path: Path, file: Path | None, descriptor: int | None) -> "NodeKey":
    from protocol.wire.signing import NodeKey
    from swarm_node.keys import owner_key as keys

    keys.read(path)  # before asking for a passphrase
    return NodeKey(keys.unlock(path, keys.passphrase(file, descriptor)))


def _copy(source: Path, target: Path, file: Path | None, descriptor: int | None) -> None:
    """Copy an owner's key to another file."""
    from swarm_node.keys import owner_key as keys

    owner = keys.read(source).owner
    keys.require_new(target)
    words = keys.passphrase(file, descriptor)
    keys.write(target, keys.unlock(source, words), words)
    keys.unlock(target, words)
    typer.echo(f"owner {owner}\n{target}")


def _state(join: "JoinString", key: "NodeKey", said: "Statement") -> "StatementReply":
    import trio

    from protocol.people.owner import seal_statement
    from swarm_node.coordinator_api.client import Coordinator

    async def send() -> "StatementReply":
        coordinator = Coordinator(join.url, join.round_id, key)
        try:
            return await coordinator.state(seal_statement(key, said))
        finally:
            await coordinator.close()

    return trio.run(send)


async def _earnings(join: "JoinString", home: Path) -> "tuple[Earnings, OwnerRates | None, Unit, bool]":
    from swarm_node.coordinator_api.client import Coordinator
    from swarm_node.keys import identity
    from swarm_node.ledger.notices import owner_rates
    from swarm_node.versions.updater import round_unit

    coordinator = Coordinator(join.url, join.round_id, identity.find_identity(home).key)
    try:
        earnings = await coordinator.earnings()
        unit = await round_unit(coordinator.origin, join.round_id)
        rates = await owner_rates(coordinator, earnings.owner)
        return earnings, rates, unit, await is_finished(coordinator)
    finally:
        await coordinator.close()


async def is_finished(coordinator: "Coordinator") -> bool:
    """Return True if the round is finished; False also if the coordinator does not report its status."""
    with suppress(SwarmError):
        return bool((await coordinator.status()).get("finished"))
    return False
