"""Finding a round: the list of what directories have, the check of each round's log, and the choice of one."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import trio

from ledger.directory import KnownRound, Sighting, look_alikes, require_possible
from ledger.listing import OpenListing, contradiction
from protocol.errors import NotFound, ProofInvalid, SwarmError, Unreachable, UntrustedMetadata, named
from protocol.limits import DAY_MS
from protocol.policy.manifest import open_manifest
from protocol.text.plain import size_text
from protocol.wire.signing import NodeKey
from swarm_node.allowance import settings
from swarm_node.base.clock import now_ms
from swarm_node.commands.next_step import is_running
from swarm_node.commands.options import EngineChoice
from swarm_node.coordinator_api.client import Coordinator
from swarm_node.coordinator_api.join_string import TRUST_FILE, parse, round_folder
from swarm_node.coordinator_api.origin import COORDINATORS, PublicOnly, open_origin
from swarm_node.doctor.forecast import FILE as SPEED_FILE
from swarm_node.doctor.forecast import Forecast, MeasuredSpeed, find_speed, forecast
from swarm_node.doctor.round_choice import (
    NOT_ASKED,
    Aim,
    RoundOption,
    earnings_line,
    matching,
    paid_line,
    ranked,
    reasons,
    why_unfit,
)
from swarm_node.engine.capacity import Capacity, HostReadings, measure_or_explain
from swarm_node.engine.choose import EngineOptions, HostMachine, this_machine
from swarm_node.engine.precision import choose_precision
from swarm_node.ledger.directories import Directories, FoundRounds, fetch_listing, require_contactable
from swarm_node.ledger.listing_check import check_listing
from swarm_node.ledger.log_reader import LogReader
from swarm_node.machine import gpu, use
from swarm_node.versions.updater import saved

ASKED_MAX = 32
"""The most rounds that are asked for their live figures."""

SIMILAR = 4.0
"""Factor between the sizes of two models up to which the speed with one says something about the other."""

PROVE_S = 900.0
"""The longest time for which the log of one round is read: a hostile log has no end, and others wait for its proof."""

ASKED_AT_ONCE = 8
ASK_S = 20.0

Ask = Callable[[str], bool]
"""Asks the owner a question with the answer yes or no."""


async def prove(
    said: OpenListing, sightings: Sequence[Sighting] = (), *, own_network: bool, patience_s: float = PROVE_S
) -> None:
    """Compare what a round says of its payouts with its own log; raise `ProofInvalid` if it lies."""
    origin = open_origin(f"{said.listing.url}/v1", own_network=own_network, patience=COORDINATORS)
    try:
        with trio.fail_after(patience_s):
            await check_listing(LogReader(origin), said, sightings)
    except trio.TooSlowError:
        raise Unreachable(
            f"The log of {said.name} could not be read within {patience_s / 60:.0f} minutes.",
            hint="If you know this round, join it by its join string.",
        ) from None
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
            await origin.close()


async def prove_now(directories: Directories, known: KnownRound, *, patience_s: float = PROVE_S) -> KnownRound:
    """Return a round with what it says now, proved by its log; refuse it for ever if it lies."""
    join, own_network = parse(known.listing.join_string), await directories.may_name_own_network()
    await require_contactable(join, own_network=own_network)
    said = await fetch_listing(join, now_ms=now_ms(), own_network=own_network)
    await require_contactable(parse(said.join_string), own_network=own_network)
    said.require_no_older_than(known.listing)
    current = KnownRound(said, known.sightings)
    require_uncontested(current)
    try:
        if (error := contradiction(known.listing, said)) is not None:
            raise error
        await prove(said, known.sightings, own_network=own_network, patience_s=patience_s)
    except ProofInvalid as error:
        directories.refuse(said, error, now_ms())
        raise
    return current


def require_uncontested(known: KnownRound) -> None:
    """Raise `UntrustedMetadata` if a round says something else than its curator saw: one of the two lies."""
    try:
        require_possible(known)
    except ProofInvalid as error:
        raise UntrustedMetadata(error.message) from None


class AskedRound(NamedTuple):
    """The answer of a round: whether its payouts are proved, and the expected earnings."""

    state: str = "as it says itself; --verify proves it"
    estimate: Forecast = NOT_ASKED


async def verify_all(directories: Directories, found: FoundRounds, price: int, home: Path) -> dict[str, AskedRound]:
    """Ask every round for its log and its figures, and return for each what came of it."""
    asked = {}
    estimates = {
        option.known.listing.round_id: option.forecast
        for option in await _ask_all(directories, found.rounds, price, home)
    }
    for known in found.rounds:
        try:
            now = await prove_now(directories, known)
            state = f"proved by {now.listing.checkpoint.size:,} entries of its log"
        except SwarmError as error:
            state = f"not proved: {named(error)}"
        asked[known.listing.round_id] = AskedRound(state, estimates[known.listing.round_id])
    return asked


class Here(NamedTuple):
    """The machine, as an agent with these options uses it."""

    engine: str
    options: EngineOptions
    machine: HostMachine
    capacity: Capacity

    async def why_refused(self, directories: Directories, known: KnownRound) -> str:
        """Return why `join` would refuse a round's model; empty if it would not, or if no version is published."""
        join, own_network = parse(known.listing.join_string), await directories.may_name_own_network()
        transport = None if own_network else PublicOnly()
        try:
            await require_contactable(join, own_network=own_network)
            from swarm_node.commands import preview  # the doctor's libraries: `rounds` alone needs none of them

            said = await preview.published(join, NodeKey(bytes(32)), transport)  # nothing is signed with it
            if said.model is not None:
                memory = self.capacity.memory
                choose_precision(self.engine, self.options, self.machine, said.model, memory, said.classes)
        except SwarmError as error:
            return _printable(error.message).rstrip(".")
        return ""


def here(home: Path, engine: EngineChoice | None = None, cards: Sequence[int] = ()) -> Here:
    """Return what an agent of this home can use: the options of `join`, by default those of a plain `join`."""
    chosen = engine or EngineChoice(vllm_python=os.environ.get("SWARM_VLLM_PYTHON", ""))
    options, machine = chosen.within(settings.read(home)), this_machine()
    probe, free = usable(gpu.find_cards(), use.memory_bytes(), is_running=is_running(home))
    readings = HostReadings(machine, probe, free, os.environ)
    found = measure_or_explain(chosen.engine.value, options, readings, cards)
    return Here(chosen.engine.value, options, machine, found)


def usable(
    probe: gpu.GpuProbe, processor: tuple[int | None, int | None], *, is_running: bool
) -> tuple[gpu.GpuProbe, int | None]:
    """Return the readings; while the agent runs all memory is free, since its engine returns its part before a move."""
    total, free = processor
    if not is_running:
        return probe, free
    return probe._replace(cards=tuple(card._replace(used_bytes=0) for card in probe.cards)), total


def blocks(found: FoundRounds, asked: dict[str, AskedRound], capacity: Capacity, price: int) -> Iterator[str]:
    """Yield a paragraph for each round, then one for the refused ones, and one for titles that look alike."""
    moment_ms = now_ms()
    for known in found.rounds:
        answered = asked.get(known.listing.round_id, AskedRound())
        yield "\n".join(_about(known, answered, capacity, price, moment_ms))
    if found.refused:
        lines = (f"  {wrong.title or 'a round'} ({wrong.round_id[:8]}): {wrong.reason}" for wrong in found.refused)
        yield "\n".join(("Refused:", *lines))
    for group in look_alikes([known.listing for known in found.rounds]):
        names = ", ".join(one.name for one in group)
        yield f"Look-alikes: {names}. They are different rounds; compare their ids with what the operator publishes."


def _about(known: KnownRound, asked: AskedRound, capacity: Capacity, price: int, moment_ms: int) -> Iterator[str]:
    said, listing, unit = known.listing, known.listing.listing, known.listing.unit
    about, model, prices = listing.description, listing.model, listing.prices
    yield said.name
    for label, text in (("Purpose", about.purpose), ("About", about.description)):
        if text:
            yield f"  {label}: {text}"
    size = f", {size_text(model.weights_bytes)}" if model.weights_bytes else ", no version is published yet"
    unfit = why_unfit(known, capacity, price, moment_ms)
    yield f"  Model: {model.name or model.architecture or 'unknown'}{size}, task {listing.task}"
    yield f"  This machine: {f'cannot join: {unfit}' if unfit else 'can join'}"
    terms = {"licence": about.licence, "operator": about.operator, "contact": about.contact}
    if said_terms := ", ".join(f"{label} {text}" for label, text in terms.items() if text):
        yield f"  Terms: {said_terms}"
    range_ = f"nodes ask {unit.between(prices.lowest, prices.highest)}, " if prices.highest else ""
    left = unit.amount(listing.budget_micros)
    yield f"  Price: {range_}it pays at most {unit.price(prices.maximum)}; budget left {left}"
    gifts = listing.totals.gifts_micros
    if asked.estimate is not NOT_ASKED:
        yield f"  {earnings_line(asked.estimate, unit)}"
    yield f"  Payouts: {paid_line(known, moment_ms)}; {asked.state}"
    if gifts:
        yield f"  Gifts: others gave {unit.exact(gifts)} to its budget"
    yield f"  Join: swarm-node join '{said.join_string}'"


def as_json(found: FoundRounds, asked: dict[str, AskedRound], capacity: Capacity, price: int) -> dict[str, Any]:
    """Return the list for programs."""
    moment_ms = now_ms()
    return {
        "rounds": [
            {
                "join_string": known.listing.join_string,
                "title": known.listing.title,
                "unit": known.listing.unit.to_json(),
                "paid_lately_micros": known.listing.paid_since(moment_ms - 30 * DAY_MS),
                "unfit": why_unfit(known, capacity, price, moment_ms),
                "payouts": asked.get(known.listing.round_id, AskedRound()).state,
                "earnings": asked.get(known.listing.round_id, AskedRound()).estimate._asdict(),
                "listing": known.listing.listing.model_dump(mode="json"),
            }
            for known in found.rounds
        ],
        "refused": [wrong.model_dump() for wrong in found.refused],
        "problems": found.problems,
    }


async def choose(
    directories: Directories,
    aim: Aim,
    *,
    words: str,
    unit: str,
    price: int,
    home: Path,
    machine: Here,
    tell: Callable[[str], None],
    asked_max: int = ASKED_MAX,
) -> KnownRound:
    """Return the best round that fits and whose payouts its log proves; say why it is the best, and what is refused."""
    found = await directories.read_all(now_ms())
    for problem in found.problems:
        tell(f"note: {problem}")
    for wrong in found.refused:
        tell(f"refused: {wrong.title or 'a round'} ({wrong.round_id[:8]}): {wrong.reason}")
    fit = []
    for known in matching(found.rounds, words, unit):  # before only some are asked
        if unfit := why_unfit(known, machine.capacity, price, now_ms()):
            tell(f"left out: {known.listing.name}: {unfit}")
        else:
            fit.append(known)
    asked = sorted(fit, key=lambda known: RoundOption(known).waits, reverse=True)[:asked_max]
    options = (
        await _ask_all(directories, asked, price, home) if aim == "earnings" else [RoundOption(known) for known in fit]
    )
    for option in ranked(options, aim):
        try:
            best = await prove_now(directories, option.known)
        except ProofInvalid as error:
            tell(f"refused: {error.message}")
            continue
        except SwarmError as error:
            tell(f"left out: {option.known.listing.name}: {named(error)}")
            continue
        if refused := await machine.why_refused(directories, best):
            tell(f"left out: {best.listing.name}: {refused}")
            continue
        tell(f"Proposed: {best.listing.name}, best by {aim}")
        for line in reasons(RoundOption(best, option.forecast), aim, now_ms()):
            tell(f"  {line}")
        tell(f"  Its log of {best.listing.checkpoint.size:,} entries proves the payouts.")
        return best
    raise NotFound(
        "No round of these directories fits, and is proved by its log.",
        hint="`swarm-node rounds` shows why; try other words, another --unit or another directory.",
    )


async def _ask_all(directories: Directories, rounds: Sequence[KnownRound], price: int, home: Path) -> list[RoundOption]:
    """Ask rounds for their live figures, some at once, and estimate what this machine would earn in each."""
    options: list[RoundOption] = []
    room = trio.CapacityLimiter(ASKED_AT_ONCE)
    own_network = await directories.may_name_own_network()

    async def ask(known: KnownRound) -> None:
        async with room:
            estimate = await _forecast(known, price, home, own_network=own_network)
        options.append(RoundOption(known, estimate))

    async with trio.open_nursery() as nursery:
        for known in rounds:
            nursery.start_soon(ask, known)
    return options


async def _forecast(known: KnownRound, price: int, home: Path, *, own_network: bool) -> Forecast:
    join = parse(known.listing.join_string)
    transport = None if own_network else PublicOnly()
    coordinator = Coordinator(join.url, join.round_id, NodeKey(bytes(32)), transport)  # nothing is signed with it
    try:
        with trio.move_on_after(ASK_S):
            await require_contactable(join, own_network=own_network)
            status, rows = await coordinator.status(), await coordinator.leaderboard()
            speed = find_speed(round_folder(home, join)) or similar_speed(
                home, known.listing.listing.model.weights_bytes
            )
            made = forecast(status, rows, price=price, unit=known.listing.unit, speed=speed)
            return made._replace(basis=_printable(made.basis), unknown=_printable(made.unknown))
        return Forecast(unknown="its coordinator did not respond in time")
    except SwarmError as error:
        return Forecast(unknown=named(error))
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
        return Forecast(unknown="its figures cannot be read by this version of swarm-node")
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
            await coordinator.close()


def similar_speed(home: Path, weights_bytes: int) -> MeasuredSpeed | None:
    """Return the speed that this machine had with the model of the most similar size, scaled to another size."""
    found: list[MeasuredSpeed] = []
    for file in home.glob(f"rounds/*/{SPEED_FILE}"):
        speed, other_bytes = find_speed(file.parent), _held_weights_bytes(file.parent)
        if speed and other_bytes and weights_bytes and 1 / SIMILAR <= other_bytes / weights_bytes <= SIMILAR:
            factor = other_bytes / weights_bytes
            found.append(MeasuredSpeed(speed.tokens_per_s * factor, speed.measured_ms, factor))
    return min(found, key=lambda speed: abs(math.log(speed.scaled_by)), default=None)


def _held_weights_bytes(folder: Path) -> int:
    """Return the size of the weights of the round in a folder, by its last signed manifest; 0 if unknown."""
    try:
        documents = saved(folder / TRUST_FILE)
        if documents is None or documents.manifest is None:
            return 0
        version = documents.policy_version
        manifest = open_manifest(documents.manifest, round_id=documents.round_id, version=version)
    except SwarmError:
        return 0
    return sum(file.size_bytes for file in manifest.files if file.path.endswith(".safetensors"))


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)
