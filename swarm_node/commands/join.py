"""`swarm-node join` and `swarm-node mirror`: taking part in a round."""

import json
import logging
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from protocol.errors import ConfigInvalid, SwarmError, named
from protocol.limits import PRICE_DEFAULT_MICROS_PER_MTOK
from protocol.people.nicknames import nickname
from protocol.text.money import parse_unit
from protocol.text.option_groups import with_option_groups
from protocol.text.plain import counted
from swarm_node.base import logs
from swarm_node.base.waiting import leave_with_parent
from swarm_node.commands.ledger import Quorum, WitnessKeys, witnesses_of
from swarm_node.commands.options import (
    DEFAULT_HOME,
    ConfirmOptions,
    DryRunOption,
    EngineChoice,
    JoinTarget,
    LimitOptions,
    NameOption,
    PriceOption,
    Quiet,
    ReachOptions,
    UploadOption,
    check_settings,
)

if TYPE_CHECKING:
    from ledger.witness import Witnesses
    from swarm_node import member
    from swarm_node.app import RunEarnings, Show
    from swarm_node.engine.choose import EngineOptions, HostMachine
    from swarm_node.engine.client import Choose

log = logging.getLogger(__name__)

EXIT_CODES = "Exit codes: 0 the round is finished or Ctrl-C was pressed, 1 error, 2 wrong usage."


@with_option_groups
def join(
    join_string: JoinTarget = "",
    *,
    confirm: ConfirmOptions,
    name: NameOption = None,
    price: PriceOption = PRICE_DEFAULT_MICROS_PER_MTOK,
    home: Annotated[Path, typer.Option(help="Folder for the key, unsent work and policy files.")] = DEFAULT_HOME,
    groups: Annotated[int, typer.Option(min=1, max=64, help="Number of prompt groups sampled at once.")] = 8,
    owner: Annotated[
        Path | None, typer.Option(help="File with the owner's delegation to this node; the node keeps a copy.")
    ] = None,
    sampling: EngineChoice,
    limits: LimitOptions,
    reach: ReachOptions,
    witness: WitnessKeys,
    quorum: Quorum = None,
    dry_run: DryRunOption = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print log lines only, without the live view.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the final earnings as JSON.")] = False,
    quiet: Quiet = False,
    child: Annotated[
        bool, typer.Option("--child", hidden=True, help="Leave the round when standard input ends.")
    ] = False,
) -> None:
    """Take part in a round until it is finished; Ctrl-C leaves cleanly, and joining again continues.

    The node makes its key at the first start, registers, downloads and verifies the newest version, and samples.
    Ctrl-C gives leases back; finished work waits in the outbox. Two agents on one machine need two values of
    --home.
    """
    import trio

    from swarm_node import app as agent
    from swarm_node.allowance.settings import changed
    from swarm_node.engine.choose import choose, this_machine, threads_of

    logs.to_stderr(quiet)
    if child:
        leave_with_parent()
    options = sampling.within(changed(home, limits.typed()))
    machine = this_machine()
    choose(sampling.engine.value, options, machine)  # refused at once, not only after the first version was downloaded
    trusted = witnesses_of(witness, quorum)
    join_string = round_of(join_string, home, confirm)
    me = build_member(join_string, home, name, reach, limits.typed(), price=price, owner=owner, witnesses=trusted)
    if dry_run or not (quiet or as_json):
        _preview(me, must=dry_run)
    choose_engine = _fitting(me, sampling.engine.value, options, machine)
    if dry_run:
        return
    settings = agent.AgentSettings(
        member=me,
        groups_per_request=groups,
        engine_command=choose_engine,
        threads=threads_of(options, machine),
        show=_live_view(wanted=not (plain or quiet or as_json or logs.are_objects())),
    )
    _say(trio.run(agent.run, settings), as_json)


@with_option_groups
def mirror(
    join_string: JoinTarget = "",
    *,
    confirm: ConfirmOptions,
    name: NameOption = None,
    home: Annotated[Path, typer.Option(help="Folder for the key and policy files.")] = DEFAULT_HOME,
    reach: ReachOptions,
    upload_gb: UploadOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON for every stored version.")] = False,
    quiet: Quiet = False,
) -> None:
    """Download every version and upload it to other nodes, without sampling, until the round is finished or Ctrl-C.

    For machines with bandwidth and no GPU. A mirror takes no work and earns nothing; the leaderboard shows the
    bytes it passed on. Each version it reports has been verified: every chunk and every file.
    """
    import trio

    from swarm_node import mirror as mirroring

    logs.to_stderr(quiet)
    join_string = round_of(join_string, home, confirm)
    settings = build_member(join_string, home, name, reach, LimitOptions(upload_gb=upload_gb).typed())

    def tell(held: mirroring.Held) -> None:
        said = json.dumps(held.to_json()) if as_json else f"Version {held.version} stored: {held.bytes} bytes."
        print(said, flush=True)

    trio.run(partial(mirroring.run, settings, tell=tell))


def round_of(target: str, home: Path, confirm: ConfirmOptions) -> str:
    """Return the join string of a host, once the owner has confirmed it; other targets stay as they are."""
    import trio

    from swarm_node.coordinator_api import last_round, short_join

    if not short_join.is_short(target):
        if confirm != ConfirmOptions():
            raise ConfigInvalid(
                "--phrase and --fingerprint confirm the round of a host.",
                hint="A join string contains the fingerprint: leave these options out.",
            )
        return target
    if confirm == ConfirmOptions() and (known := last_round.find_by_url(home, short_join.urls_of(target))):
        return str(known)
    ask = _ask_owner if sys.stdin.isatty() and sys.stderr.isatty() else None
    proof = short_join.Proof(confirm.phrase, confirm.fingerprint, ask)
    return str(trio.run(short_join.find_round, target, proof))


def _ask_owner(url: str, phrase: str) -> bool:
    """Show the phrase of a round, and return True if the owner confirms it."""
    typer.echo(f"{url} serves the round with this phrase:\n\n    {phrase}\n", err=True)
    typer.echo("Compare it with the phrase that the operator gave you another way than by this address.", err=True)
    return typer.confirm("Are all six words the same?", default=False, err=True)


def build_member(
    join_string: str,
    home: Path,
    name: str | None,
    reach: ReachOptions,
    limits: dict[str, Any],
    *,
    price: int = 0,
    owner: Path | None = None,
    witnesses: "Witnesses | None" = None,
) -> "member.MemberSettings":
    """Return the settings of a member; create its key if there is none."""
    from swarm_node import member
    from swarm_node.coordinator_api import last_round
    from swarm_node.keys import delegation, identity

    join = last_round.chosen(join_string, home)
    given = last_round.name_of(home) if name is None else name
    check_settings(given or "-", price, reach.listen, reach.advertise)
    me = identity.load_or_create(home / identity.FILE).key.node_id
    return member.MemberSettings(
        join=join,
        home=home,
        name=given or nickname(me),
        given_name=given,
        price_micros_per_mtok=price,
        **asdict(reach),
        delegation=delegation.kept(home, me, owner),
        limits=limits,
        witnesses=witnesses or member.NOBODY,
    )


def _preview(settings: "member.MemberSettings", *, must: bool) -> None:
    """Print demand and expected earnings before anything is downloaded; with `must`, raise an error if unknown."""
    import trio

    from swarm_node.commands import preview
    from swarm_node.keys import identity

    key = identity.load_or_create(settings.home / identity.FILE).key
    try:
        said = trio.run(preview.print_preview, settings, key)
    except SwarmError as error:
        if must:
            raise
        said = [f"Demand and earnings: unknown: {named(error)}"]
    for line in said:
        typer.echo(line, err=True)


def _fitting(
    settings: "member.MemberSettings", wanted: str, options: "EngineOptions", machine: "HostMachine"
) -> "Choose":
    """Return the chooser of the engine, with the precision that fits the round's model; raise an error if none fits.

    If the round cannot be reached, or has published no version yet, the agent decides later.
    """
    import trio

    from swarm_node.commands import preview
    from swarm_node.doctor import cards
    from swarm_node.engine.choose import for_policy
    from swarm_node.engine.precision import Memory, choose_precision
    from swarm_node.keys import identity
    from swarm_node.machine import gpu, use

    key = identity.load_or_create(settings.home / identity.FILE).key
    try:
        round_ = trio.run(preview.published, settings, key)
    except SwarmError:  # the agent logs the reason, and retries if that helps
        log.info("precision: not decided yet; the coordinator does not respond")
        return partial(for_policy, wanted, options)
    if round_.model is None:
        log.info("precision: not decided yet; no version is published")
        return partial(for_policy, wanted, options)
    memory = Memory(cards.free_bytes(gpu.find_cards(), vram_share=options.vram_share), use.memory_bytes()[1])
    chosen = choose_precision(wanted, options, machine, round_.model, memory, round_.classes)
    log.info("precision: %s", chosen.line)
    fit = options._replace(dtype=chosen.dtype)
    return lambda unfit: for_policy(wanted, fit, {**chosen.unfit, **unfit})


def _live_view(*, wanted: bool) -> "Show | None":
    """Return the live view, if standard error is a terminal and it is wanted."""
    from rich.console import Console

    from swarm_node.owner import live_view

    console = Console(stderr=True)
    return live_view.make(console) if wanted and live_view.can_show(console) else None


def _say(earnings: "RunEarnings", as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(vars(earnings)))
        return
    rejected = ", ".join(f"{count} {code}" for code, count in earnings.rejected.items())
    worth = parse_unit(earnings.unit).amount(earnings.credit_micros)
    typer.echo(
        f"Accepted {counted(earnings.accepted, 'rollout')} of {earnings.tokens:,} tokens, "
        f"worth {worth}" + (f"; rejected: {rejected}." if rejected else ".")
    )
