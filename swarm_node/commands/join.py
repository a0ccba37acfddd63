"""`swarm-node join` and `swarm-node mirror`: taking part in a round."""

import json
import logging
import os
from dataclasses import asdict
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from protocol.errors import ConfigInvalid, SwarmError, Unreachable, UntrustedRoot, WrongAddress, named
from protocol.limits import PRICE_DEFAULT_MICROS_PER_MTOK, ROUNDS_PER_AGENT_MAX
from protocol.people.names import nickname
from protocol.start import quick_imports
from protocol.text.commands import with_option_groups
from protocol.text.money import parse_unit
from protocol.text.plain import counted, one_line
from swarm_node.base import logs
from swarm_node.commands.ledger import Quorum, WitnessKeys, witnesses_of
from swarm_node.commands.options import (
    DEFAULT_HOME,
    BestOptions,
    CardsOption,
    ConfirmOptions,
    DryRunOption,
    EngineChoice,
    JoinTarget,
    JoinTargets,
    LimitOptions,
    NameOption,
    NotifyOption,
    PageOption,
    PriceOption,
    Quiet,
    ReachOptions,
    UploadOption,
    check_settings,
    words_of,
)
from swarm_node.commands.targets import check_form, round_of, rounds_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ledger.witness import Witnesses
    from swarm_node import member
    from swarm_node.app import AgentRun, RunEarnings, Show
    from swarm_node.engine.cards import EngineCard
    from swarm_node.engine.choose import EngineOptions, HostMachine
    from swarm_node.engine.client import Choose

log = logging.getLogger(__name__)

EXIT_CODES = (
    "Exit codes: 0 the round is finished, or Ctrl-C ended the agent, 1 error, 2 wrong usage, 130 Ctrl-C while no "
    "agent was running."
)
INTERRUPTED = 130
"""Exit code of shells for a program that SIGINT ended."""


def interruptible(command: "Callable[..., None]") -> "Callable[..., None]":
    """Return the command with one sentence for Ctrl-C while no agent runs; a running agent handles signals itself."""

    @wraps(command)
    def run(*values: Any, **options: Any) -> None:
        try:
            command(*values, **options)
        except KeyboardInterrupt:
            typer.echo("Stopped by Ctrl-C. No agent is running.", err=True)
            raise typer.Exit(INTERRUPTED) from None

    return run


@with_option_groups
@interruptible
def join(
    join_strings: JoinTargets = None,
    *,
    confirm: ConfirmOptions,
    best: BestOptions,
    name: NameOption = None,
    price: PriceOption = PRICE_DEFAULT_MICROS_PER_MTOK,
    home: Annotated[Path, typer.Option(help="Folder for the key, unsent work and policy files.")] = DEFAULT_HOME,
    groups: Annotated[
        int, typer.Option(min=1, max=64, help="Number of prompt groups sampled at once, on each card.")
    ] = 8,
    owner: Annotated[
        Path | None, typer.Option(help="File with the owner's delegation to this node; the node keeps a copy.")
    ] = None,
    sampling: EngineChoice,
    cards: CardsOption = "",
    limits: LimitOptions,
    reach: ReachOptions,
    witness: WitnessKeys,
    quorum: Quorum = None,
    notify: NotifyOption = "",
    page: PageOption = None,
    dry_run: DryRunOption = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print log lines only, without the live view.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the final earnings as JSON.")] = False,
    quiet: Quiet = False,
    child: Annotated[
        bool, typer.Option("--child", hidden=True, help="Leave the round when standard input ends.")
    ] = False,
) -> None:
    """Take part in a round until it is finished, or in several; Ctrl-C leaves cleanly, and joining again continues.

    The node makes its key at the first start, registers, downloads and verifies the newest version, and samples.
    Ctrl-C sends finished work and returns the other leases; work that cannot be sent waits in the outbox for the next
    start. A second Ctrl-C stops at once. Two agents on one machine need two values of --home. With --best, the round is
    chosen from directories (`swarm-node rounds`), proved by its log, and confirmed.

    With several join strings the node works for the first round that has work. When that one has none, it continues
    with the next one at once, and returns when an earlier one has work again. A base that they share is fetched once.
    """
    from swarm_node.allowance.settings import changed
    from swarm_node.commands.rounds import choose_best
    from swarm_node.engine.cards import parse_cards
    from swarm_node.engine.choose import this_machine, threads_of
    from swarm_node.keys import identity

    logs.to_stderr(quiet)
    if child:
        from swarm_node.base.waiting import leave_with_parent

        leave_with_parent()
    command = words_of(notify)
    # What costs nothing is checked first: the form of what was typed, then whether the home is in use.
    wanted = parse_cards(cards)
    trusted = witnesses_of(witness, quorum)
    typed = list(join_strings or [])
    best.require_whole(typed[0] if typed else "")
    for text in typed:
        check_form(text)
    check_settings(name or "-", price, reach.listen, reach.advertise)
    if not dry_run:
        identity.require_no_agent(home)
    options = sampling.within(changed(home, limits.typed()))
    machine = this_machine()
    joins_cards = _joins_cards(sampling.engine.value, options, machine, must=not dry_run)
    chooser = partial(choose_best, best, home, price, engine=sampling, cards=wanted)
    targets = [chooser(ask=not dry_run)] if best.best else rounds_of(typed, home, confirm)
    previews = dry_run or not (quiet or as_json)
    while True:
        if previews:
            _announce(targets)
        members = [
            build_member(
                target, home, name, reach, limits.typed(), price=price, owner=owner, witnesses=trusted, page=page
            )
            for target in targets
        ]
        require_several(members)
        fits = _all_fitting(
            members,
            partial(
                _fitting,
                wanted=sampling.engine.value,
                options=options,
                machine=machine,
                wanted_cards=wanted,
                tell=_tell_line if dry_run else log.info,
            ),
            preview=partial(_preview, joins_cards=joins_cards) if previews else None,
            must=dry_run,
        )
        if dry_run:
            return end_dry_run(fits)
        show = _live_view(wanted=not (plain or quiet or as_json or logs.are_objects()))
        done = _run(fits, groups, threads_of(options, machine), show, command)
        for earnings in done.rounds:
            _say(earnings, as_json, named=len(done.rounds) > 1)
        if not done.next_round:
            return
        targets = [done.next_round]


def _joins_cards(wanted: str, options: "EngineOptions", machine: "HostMachine", *, must: bool) -> bool:
    """Return True if several cards may hold one model together.

    With `must`, refuse a missing engine at once, not only after the first version was downloaded. Without, the same
    refusal follows the figures of the round.
    """
    from swarm_node.engine.choose import choose

    try:
        return choose(wanted, options, machine).name == "vllm" and options.cards_per_engine != 1
    except ConfigInvalid:
        if must:
            raise
        return False


def _announce(targets: "Sequence[str]") -> None:
    """Print which rounds are asked, before the imports for it, which take seconds on a busy machine."""
    urls = ", ".join(target.partition("#")[0] for target in targets)
    typer.echo(f"Asking {urls} …", err=True)


def _run(
    fits: "Sequence[FittingRound]",
    groups: int,
    threads: int,
    show: "Show | None",
    notify: tuple[str, ...],
) -> "AgentRun":
    """Run the agent; a card that the model of one round does not fit on is left out."""
    with quick_imports():
        import trio

        from swarm_node import app as agent

    settings = agent.AgentSettings(
        rounds=tuple(agent.RoundChoice(fit.member, fit.choose) for fit in fits),
        groups_per_request=groups,
        threads=threads,
        cards=max((fit.cards for fit in fits), key=lambda cards: sum(bool(card.left_out) for card in cards)),
        show=show,
        notify=notify,
    )
    return trio.run(agent.run, settings)


@with_option_groups
@interruptible
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
    with quick_imports():
        import trio

        from swarm_node import mirror as mirroring

    logs.to_stderr(quiet)
    join_string = round_of(join_string, home, confirm)
    settings = build_member(join_string, home, name, reach, LimitOptions(upload_gb=upload_gb).typed())

    def show(held: mirroring.Held) -> None:
        said = json.dumps(held.to_json()) if as_json else f"Version {held.version} stored: {held.bytes} bytes."
        print(said, flush=True)

    trio.run(partial(mirroring.run, settings, show=show))


class FittingRound(NamedTuple):
    """A round whose model this machine can sample."""

    member: "member.MemberSettings"
    choose: "Choose"
    cards: "tuple[EngineCard, ...]"
    why_not: str = ""
    """Reason why it cannot be joined now; empty if it can, or if nothing is known."""


def _all_fitting(
    members: "Sequence[member.MemberSettings]",
    fitting: "Callable[..., tuple[Choose, tuple[EngineCard, ...]]]",
    *,
    preview: "Callable[..., str] | None",
    must: bool,
) -> list[FittingRound]:
    """Return the rounds that fit; of several, one that does not fit is left out and named, unless none fits."""
    fits: list[FittingRound] = []
    for number, me in enumerate(members, 1):
        why_not = ""
        try:
            if preview is not None:
                if len(members) > 1:
                    typer.echo(f"{me.join.url}:", err=True)
                why_not = preview(me, must=must)
            fits.append(FittingRound(me, *fitting(me), why_not))
            if must:
                typer.echo(verdict_line(why_not), err=True)
        except SwarmError as error:
            if number == len(members) and not fits:
                raise
            log.error("the round at %s is left out code=%s: %s", me.join.url, error.code, error)
    return alike(fits, fitting)


def alike(
    fits: "Sequence[FittingRound]", fitting: "Callable[..., tuple[Choose, tuple[EngineCard, ...]]]"
) -> list[FittingRound]:
    """Return the rounds, decided again if one needs more joined cards: all engines of a node have as many.

    A round whose model cannot be split over so many is left out and named.
    """
    counts = {len(card.numbers) for fit in fits for card in fit.cards if not card.left_out}
    if len(counts) < 2:
        return list(fits)
    again: list[FittingRound] = []
    for fit in fits:
        try:
            again.append(FittingRound(fit.member, *fitting(fit.member, joined=max(counts)), fit.why_not))
        except SwarmError as error:
            log.error("the round at %s is left out code=%s: %s", fit.member.join.url, error.code, error)
    return again


def end_dry_run(fits: "Sequence[FittingRound]") -> None:
    """End `--dry-run`, with exit code 1 if no round can be joined now."""
    if all(fit.why_not for fit in fits):
        raise typer.Exit(1)


def verdict_line(why_not: str) -> str:
    """Return the last line of `--dry-run` about a round whose model this machine can sample."""
    if why_not:
        return f"This machine cannot join this round now: {why_not}."
    return "This machine can join this round. To take part, run the same command without --dry-run."


def require_several(members: "Sequence[member.MemberSettings]") -> None:
    """Refuse a round that is named twice, too many rounds, and one address for several."""
    from protocol.people.addresses import host_and_port

    if len(members) == 1:
        return
    if len(members) > ROUNDS_PER_AGENT_MAX:
        raise ConfigInvalid(f"{len(members)} rounds: a node takes part in {ROUNDS_PER_AGENT_MAX} at most.")
    ids = [me.join.round_id for me in members]
    if twice := next((me for me in members if ids.count(me.join.round_id) > 1), None):
        raise ConfigInvalid(
            f"The round at {twice.join.url} is named twice.", hint="Give each round once, in the order of your choice."
        )
    listen = members[0].listen
    if members[0].advertise or (listen and host_and_port(listen)[1]):
        raise ConfigInvalid(
            "Each round needs a port of its own.", hint="Leave --advertise out, and --listen too, or give it port 0."
        )


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
    page: bool | None = None,
) -> "member.MemberSettings":
    """Return the settings of a member; create its key if there is none."""
    from swarm_node import member
    from swarm_node.coordinator_api import last_round
    from swarm_node.keys import delegation, identity
    from swarm_node.ledger.directories import Directories

    join = last_round.chosen(join_string, home)
    Directories(home).require_not_refused(join.round_id)
    given = last_round.name_of(home) if name is None else name
    check_settings(given or "-", price, reach.listen, reach.advertise)
    me = identity.load_or_create(home / identity.FILE).key.node_id
    return member.MemberSettings(
        join=join,
        home=home,
        name=given or nickname(me),
        given_name=given,
        page=last_round.wants_page(home) if page is None else page,
        price_micros_per_mtok=price,
        **asdict(reach),
        delegation=delegation.kept(home, me, owner),
        limits=limits,
        witnesses=witnesses or member.NOBODY,
    )


def _preview(settings: "member.MemberSettings", *, must: bool, joins_cards: bool) -> str:
    """Print demand and expected earnings before anything is downloaded; return why the round cannot be joined now.

    With `must`, raise an error if nothing is known.
    """
    import trio

    from swarm_node.commands import preview
    from swarm_node.keys import identity

    key = identity.load_or_create(settings.home / identity.FILE).key
    try:
        seen = trio.run(partial(preview.preview_round, settings, key, joins_cards=joins_cards))
    except SwarmError as error:
        if must or _ends_join(error, settings):
            raise
        seen = preview.RoundPreview([f"Demand and earnings: unknown: {named(error)}"])
    for line in seen.lines:
        typer.echo(line, err=True)
    return seen.why_not


def _fitting(
    settings: "member.MemberSettings",
    wanted: str,
    options: "EngineOptions",
    machine: "HostMachine",
    wanted_cards: tuple[int, ...],
    tell: "Callable[[str], None]",
    joined: int = 0,
) -> tuple["Choose", "tuple[EngineCard, ...]"]:
    """Return the chooser of the engine, with the precision that fits the round's model, and the cards that can hold it.

    Raise an error if no precision fits, or if the join string is wrong. If the round cannot be reached, or has
    published no version yet, the agent decides later. `joined` is the number of cards of each engine if another round
    needs so many.
    """
    import trio

    from swarm_node.commands import preview
    from swarm_node.engine import capacity
    from swarm_node.engine.card_engine import card_names
    from swarm_node.engine.cards import ON_CPU, engine_cards
    from swarm_node.engine.choose import for_policy
    from swarm_node.engine.precision import choose_precision
    from swarm_node.keys import identity
    from swarm_node.machine import gpu, use

    options = options._replace(cards_per_engine=joined or options.cards_per_engine)
    readings = capacity.HostReadings(machine, gpu.find_cards(), use.memory_bytes()[1], os.environ)
    here = capacity.measure(wanted, options, readings, wanted_cards)
    seen, share = here.seen, options.vram_share
    key = identity.load_or_create(settings.home / identity.FILE).key
    try:
        round_ = trio.run(preview.published, settings.join, key)
    except SwarmError as error:  # the agent retries if that helps
        if _ends_join(error, settings):
            raise
        reason = "the coordinator does not respond" if isinstance(error, Unreachable) else named(error)
        tell(f"Precision: decided when the round's model is known; now {reason}")
        return partial(for_policy, wanted, options), engine_cards(seen, joined=max(1, options.cards_per_engine))
    if round_.model is None:
        tell("Precision: decided with the first version; none is published yet")
        return partial(for_policy, wanted, options), engine_cards(seen, joined=max(1, options.cards_per_engine))
    chosen = choose_precision(wanted, options, machine, round_.model, here.memory, round_.classes)
    tell(f"Precision: {chosen.line}")
    fit = options._replace(dtype=chosen.dtype, cards_per_engine=chosen.cards)
    why = chosen.cards_line if chosen.cards > 1 else ""
    engines: tuple[EngineCard, ...] = ON_CPU
    if chosen.device != "cpu":
        engines = engine_cards(seen, chosen.need_bytes, vram_share=share, joined=chosen.cards, why_joined=why)
    if chosen.cards_line:
        tell(f"Cards: {chosen.cards_line}")
    for card in engines:
        if card.name:
            tell(f"{card_names(card).capitalize()} ({card.name}): {card.left_out or 'used'}")
    return lambda unfit: for_policy(wanted, fit, {**chosen.unfit, **unfit}), engines


def _tell_line(text: str) -> None:
    """Print a line of the report of `--dry-run`, beside those of the preview."""
    typer.echo(one_line(text), err=True)


def _ends_join(error: SwarmError, settings: "member.MemberSettings") -> bool:
    """Return True if no coordinator or one with another root answers, in a round that was never trusted here.

    A round that was trusted before may be back when the attack or the mistake is over: the agent retries.
    """
    from swarm_node.coordinator_api.join_string import was_trusted

    return isinstance(error, UntrustedRoot | WrongAddress) and not was_trusted(settings.home, settings.join)


def _live_view(*, wanted: bool) -> "Show | None":
    """Return the live view, if standard error is a terminal and it is wanted."""
    from rich.console import Console

    from swarm_node.owner import live_view

    console = Console(stderr=True)
    return live_view.make(console) if wanted and live_view.can_show(console) else None


def _say(earnings: "RunEarnings", as_json: bool, *, named: bool) -> None:
    """Print the totals in one round; `named` with several rounds."""
    from swarm_node.owner.status_lines import rejected_text

    if as_json:
        typer.echo(json.dumps(vars(earnings)))
        return
    if named:
        typer.echo(f"{earnings.coordinator}: {earnings.error}".rstrip(": "))
    worth = parse_unit(earnings.unit).amount(earnings.credit_micros)
    typer.echo(
        f"Accepted {counted(earnings.accepted, 'rollout')} of {counted(earnings.tokens, 'token')}, worth {worth}; "
        f"{rejected_text(earnings.rejected)}."
    )
    if earnings.unsent:
        typer.echo(
            f"Not sent: {counted(earnings.unsent, 'finished rollout')}. Run `swarm-node join` again soon: it sends "
            "them, and the coordinator accepts them until their leases expire."
        )
