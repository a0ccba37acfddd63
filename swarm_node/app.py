"""Wiring of the node agent: creates all parts and connects them.

- An agent takes part in one round or in several. Each has its own coordinator, folder, outbox, receipts and heartbeats;
  they share the key, the owner's limits, the engine and the owner's page.
- A round that refuses the node, that cannot be trusted, or in which the agent fails by a fault of its own, ends alone,
  and the owner's command (`notify`) reports it. If no other is left, so does the agent.
- With several rounds, log lines name theirs.
"""

import logging
import math
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import trio

from protocol.errors import SwarmError
from protocol.limits import EXACT_BONUS_MAX
from protocol.text.money import CREDITS
from protocol.text.plain import counted
from swarm_node.allowance.governor import Governor
from swarm_node.allowance.round_gate import RoundGate
from swarm_node.base import logs
from swarm_node.base.clock import now_ms
from swarm_node.base.waiting import first_of
from swarm_node.coordinator_api import last_round
from swarm_node.coordinator_api.join_string import round_folder
from swarm_node.doctor.forecast import record_speed
from swarm_node.engine.cards import EngineCard
from swarm_node.engine.client import Choose
from swarm_node.engine.pool import EnginePool, open_pool
from swarm_node.ledger.notices import Notices
from swarm_node.ledger.receipts import Claims
from swarm_node.machine.gpu import GpuProbe, find_cards
from swarm_node.member import Member, MemberSettings, NodeHome, open_home, open_member
from swarm_node.owner import stopped
from swarm_node.owner.control_server import listening
from swarm_node.owner.notify import OwnerNotifier
from swarm_node.owner.page.server import PageSources, serving_page
from swarm_node.owner.snapshot import ANSWER_TEXT_MAX_CHARS, Agent, AgentSnapshot
from swarm_node.work.engine_turn import EngineTurn, EngineTurns, RoundPay, order_by_pay
from swarm_node.work.held_leases import HeldLeases
from swarm_node.work.lease_offers import LeaseOffers
from swarm_node.work.lease_pacing import LeasePacing, NodePace
from swarm_node.work.outbox import Outbox
from swarm_node.work.progress_reporter import ProgressReporter
from swarm_node.work.pulse import Pulse
from swarm_node.work.records import REJECTIONS, LeaseLog, Rejections
from swarm_node.work.round_engine import RoundEngine
from swarm_node.work.sender import RolloutWriter, Sender
from swarm_node.work.verdicts import VerdictRecorder
from swarm_node.work.worker import Worker

log = logging.getLogger(__name__)

ORDER_EVERY_S = 5.0
"""Interval at which the order of several rounds is computed anew."""

E = TypeVar("E", bound=BaseException)

Show = Callable[[Callable[[], AgentSnapshot]], Awaitable[None]]

FINAL_SEND_S = 10.0
"""Longest wait for the verdicts of the last rollouts when the agent leaves a round."""

SIGNAL_AGAIN_S = 1.0
"""Time after a signal in which another one is the same one: some programs send it to the process and to its group."""

ENDED_BY = {
    signal.SIGINT: "Ctrl-C, or the signal SIGINT",
    signal.SIGHUP: "a closed terminal, or the signal SIGHUP",
}


@dataclass(frozen=True)
class RoundChoice:
    """A round that the owner chose, and how its engine is chosen."""

    member: MemberSettings
    engine: Choose


@dataclass(frozen=True)
class AgentSettings:
    """Settings of an agent, chosen by the owner."""

    rounds: tuple[RoundChoice, ...]
    """Rounds in the owner's order: the node works for the first that has work, unless the best paid comes first."""
    groups_per_request: int
    threads: int = 1
    """Threads of each engine child; other load on the machine belongs to other programs."""
    cards: tuple[EngineCard, ...] = (EngineCard(),)
    """Graphics cards, each with an engine child; a card without a name stands for the default device."""
    look_at_cards: Callable[[], GpuProbe] = find_cards
    show: Show | None = None
    """Draws the live view, if there is a terminal."""
    notify: tuple[str, ...] = ()
    """The owner's command for messages about trouble and payouts; empty: none."""


@dataclass(frozen=True)
class RunEarnings:
    """Totals of a run of the agent in one round."""

    coordinator: str
    accepted: int
    rejected: dict[str, int]
    tokens: int
    credit_micros: int
    unit: dict[str, Any]
    """The unit of which `credit_micros` are the millionths: its name and decimals."""
    error: str = ""
    """Reason why the agent left this round before the others; empty if it did not."""
    unsent: int = 0
    """Finished rollouts that wait in the outbox until the next start."""


@dataclass(frozen=True)
class AgentRun:
    """Totals of a run of the agent."""

    rounds: tuple[RunEarnings, ...]
    next_round: str = ""
    """Join string of the round to which the owner moves the node; empty: none."""


async def run(settings: AgentSettings) -> AgentRun:
    """Take part in rounds until they are finished, a signal arrives, or the owner stops the agent."""
    first = settings.rounds[0].member
    async with open_home(first.home, first.limits) as node:
        stopped.forget(first.home)
        try:
            done, said = await _work(settings, node)
        except* SwarmError as group:
            error = next(leaves(group))
            await trio.to_thread.run_sync(stopped.record_end, first.home, error)
            raise error from None
        stopped.record_end(first.home, None, said)
        return done


async def _work(settings: AgentSettings, node: NodeHome) -> tuple[AgentRun, str]:
    """Work until the end; return the totals and the reason of the end."""
    first = settings.rounds[0]
    used = [card for card in settings.cards if not card.left_out]
    governor = Governor(
        first.member.home,
        node.uploads,
        price=first.member.price_micros_per_mtok,
        given=dict(first.member.limits),
        threads=settings.threads * len(used),
        cards=[number for card in used if card.name for number in card.numbers],
        look_at_cards=settings.look_at_cards,
    )
    said, moves = "Ctrl-C or a signal, while it was leaving", ""
    async with open_pool(first.engine, settings.cards) as engine, trio.open_nursery() as nursery:
        turns = EngineTurns()
        parts = AgentParts(settings, node, governor, engine)
        rounds = AgentRounds(
            [AgentRound(parts, turns.turn_of(n), choice) for n, choice in enumerate(settings.rounds)], nursery
        )
        nursery.start_soon(leave_on_signal, node.signals, governor, nursery.cancel_scope)
        async with trio.open_nursery() as working:
            for one in rounds.all:
                working.start_soon(one.run, rounds)
            await rounds.opened()
            page = PageSources(first.member.home, rounds.folders, governor, rounds.status)
            serving = serving_page(page) if first.member.page else nullcontext()
            async with listening(first.member.home, governor, rounds.status), serving:
                nursery.start_soon(partial(governor.run, watch_cards=settings.show is not None))
                if settings.show is not None:
                    nursery.start_soon(settings.show, rounds.snapshot)
                nursery.start_soon(_steer, governor, engine)
                if len(rounds.all) > 1:
                    nursery.start_soon(keep_order, governor, rounds, turns)
                await rounds.ended()
        said, moves = describe_end(governor, [one.gate for one in rounds.all])
        nursery.cancel_scope.cancel()
    errors = [one.error for one in rounds.all if one.error]
    if len(errors) == len(rounds.all):
        raise errors[0]
    earnings = tuple(one.earnings() for one in rounds.all)
    if unsent := sum(one.unsent for one in earnings):
        said = f"{said}; in the outbox for the next start: {counted(unsent, 'finished rollout')}"
    return AgentRun(earnings, moves), said


async def leave_on_signal(signals: AsyncIterator[int], governor: Governor, scope: trio.CancelScope) -> None:
    """Leave the rounds at the first signal, as `leave` does; at one while leaving, cancel what still goes on."""
    came_at = math.inf
    async for number in signals:
        is_new = came_at == math.inf or trio.current_time() >= came_at + SIGNAL_AGAIN_S
        if governor.leaving.is_set() and is_new:
            log.info("stopping at once signal=%s", signal.Signals(number).name)
            scope.cancel()
        elif came_at == math.inf:
            came_at = trio.current_time()
            name = signal.Signals(number)
            governor.left_by = ENDED_BY.get(name, f"the signal {name.name}")
            log.info("leaving: finished rollouts are sent, other leases are returned; the next Ctrl-C stops at once")
            governor.leave()


def describe_end(governor: Governor, gates: Sequence[RoundGate]) -> tuple[str, str]:
    """Return why the agent ends, and the join string of the round that it moves to; empty if to none."""
    if governor.leaving.is_set():
        return governor.left_by or "stopped by `swarm-node leave`", ""
    if governor.next_round:
        return f"moving to {governor.next_round.partition('#')[0]}", governor.next_round
    if governor.finishing or all(gate.is_ended_by_owner for gate in gates):
        return "finished, as you requested", ""
    return "the round is finished" if len(gates) == 1 else "all rounds are finished", ""


async def _steer(governor: Governor, engine: EnginePool) -> None:
    """Pass on the owner's permission for each card."""
    while True:
        engine.steer(governor.card_decisions)
        await governor.changes()


async def keep_order(governor: Governor, rounds: "AgentRounds", turns: EngineTurns) -> None:
    """Keep the order of the rounds at the engine as the owner wants it."""
    while True:
        turns.set_order(rounds.order(best_paid_first=governor.limits.best_paid_first))
        with trio.move_on_after(ORDER_EVERY_S):
            await governor.changes()


def leaves(group: BaseExceptionGroup[E]) -> Iterator[E]:
    """Yield the errors in nested exception groups."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error


@dataclass(frozen=True)
class AgentParts:
    """The parts of an agent that all its rounds share."""

    settings: AgentSettings
    node: NodeHome
    governor: Governor
    engine: EnginePool


class AgentRound:
    """The agent's work in one round: its own coordinator, ledger, outbox and versions, and the shared engine."""

    def __init__(self, parts: AgentParts, turn: EngineTurn, choice: RoundChoice) -> None:
        self._parts, self._turn, self._choice = parts, turn, choice
        self.member, self.join = choice.member, choice.member.join
        self.is_registered = False
        self.agent: Agent | None = None
        self.error: SwarmError | None = None
        """Reason why the agent left this round."""
        self._first_speed = 0.0
        """Tokens per second when the first load of this run had ended; 0 before."""
        self.gate = parts.governor.open_round(self.join)
        self.opened, self.ended = trio.Event(), trio.Event()
        """Set when the parts exist, and when the round has ended for this agent; both in any case."""

    async def run(self, rounds: "AgentRounds") -> None:
        """Take part until the round has ended, or refuses this node; other rounds go on."""
        if len(rounds.all) > 1:
            logs.round_name.set(self.join.url.partition("://")[2])
        try:
            await self._run(rounds)
        except* SwarmError as group:
            self.error = next(leaves(group))
            if len(rounds.all) > 1:
                log.error("left the round at %s code=%s: %s", self.join.url, self.error.code, self.error)
        except* Exception as group:  # a fault of this program in one round is no end of the others
            if len(rounds.all) == 1:
                raise
            log.exception("left the round at %s", self.join.url)
            first = next(leaves(group))
            self.error = SwarmError(
                f"The agent failed in this round ({type(first).__name__}).",
                hint="Report the traceback in the log; `swarm-node join` takes part again.",
            )
        finally:
            if self.error is not None:
                rounds.record_left(self)
            if any(not one.ended.is_set() for one in rounds.all if one is not self):
                await self._unload()
            self._turn.release()
            self._parts.governor.close_round(self.gate)
            self.opened.set()
            self.ended.set()

    async def _unload(self) -> None:
        """Free the memory of the engine if it has a version of this round, since no other worker may do that."""
        if self._turn.is_mine and self._turn.try_acquire():
            with trio.CancelScope(shield=True):
                await self._parts.engine.rest()

    async def _run(self, rounds: "AgentRounds") -> None:
        governor, gate, engine = self._parts.governor, self.gate, self._parts.engine
        async with open_member(self.member, self._parts.node) as me, trio.open_nursery() as nursery:
            outbox = Outbox(me.folder / "outbox")
            verdicts = VerdictRecorder(outbox, Claims(me.folder / "claims"), Rejections(me.folder / REJECTIONS))
            sender = Sender(me.coordinator, outbox, verdicts)
            notices = Notices(me.coordinator, me.folder)
            reporter = ProgressReporter(me.coordinator, me.key, self.join.round_id)
            worker = self._open_worker(me, outbox, sender, reporter)
            pulse = Pulse(me, worker)
            self.agent = Agent(me, pulse, worker, engine, verdicts, outbox, notices, governor, gate, now_ms())
            self.opened.set()
            try:
                ends = (governor.leaving.wait, gate.leaving.wait)
                # A round that does not answer is not waited for once the owner wants it to finish.
                await first_of(partial(self._register, pulse, rounds), gate.finishes, *ends)
                notifier = self.notifier()
                for machine in (pulse, me.policies, me.log_watch, verdicts.guard, worker, notices, notifier):
                    nursery.start_soon(machine.run)
                if me.mapper is not None:
                    nursery.start_soon(me.mapper.run)
                nursery.start_soon(pulse.listen)
                nursery.start_soon(sender.run, worker.add_turns)
                nursery.start_soon(reporter.run, worker.cancel)
                nursery.start_soon(_return_at_limits, gate, worker)
                await first_of(worker.finished.wait, *ends)
                log.info("leaving: %s", describe_end(governor, [gate])[0])
                await worker.stop()
                await _drain(sender, outbox, retries=not (governor.leaving.is_set() or gate.leaving.is_set()))
                nursery.cancel_scope.cancel()
            finally:
                record_speed(me.folder, worker.tokens_per_s, now_ms())
                if self.is_registered:
                    await pulse.leave()

    async def _register(self, pulse: Pulse, rounds: "AgentRounds") -> None:
        await pulse.register()
        self.is_registered = True
        rounds.record_joined()

    def _open_worker(self, me: Member, outbox: Outbox, sender: Sender, reporter: ProgressReporter) -> Worker:
        """Create the worker of this round, and its parts."""
        governor, pool = self._parts.governor, self._parts.engine
        groups = self._parts.settings.groups_per_request
        engine = RoundEngine(pool, self._turn, me.policies, self._choice.engine)
        writer = RolloutWriter(me.key, self.join.round_id, outbox, sender)
        leases = HeldLeases(me.coordinator, reporter)
        offers = LeaseOffers(
            coordinator=me.coordinator,
            leases=leases,
            lease_log=LeaseLog(me.folder),
            gate=self.gate,
            pacing=LeasePacing(lambda: groups * pool.cards_ready),
            pace=lambda: NodePace(engine.tokens_per_s, writer.tokens_per_sample),
            price_floor=lambda: governor.limits.price_floor,
        )
        return Worker(
            policies=me.policies,
            engine=engine,
            leases=leases,
            offers=offers,
            writer=writer,
            sender=sender,
            reporter=reporter,
            gate=self.gate,
        )

    def notifier(self) -> OwnerNotifier:
        """Return what runs the owner's command for this round, also once the agent has left it."""
        assert self.agent is not None
        return OwnerNotifier(self._parts.settings.notify, self.folder, self._snapshot)

    def _snapshot(self) -> AgentSnapshot:
        assert self.agent is not None
        snapshot = self.agent.snapshot()
        return replace(snapshot, trouble=f"Left the round. {self.error}") if self.error else snapshot

    @property
    def folder(self) -> Path:
        """Folder of the round in the home."""
        return round_folder(self.member.home, self.join)

    @property
    def has_engine(self) -> bool:
        """True if the engine has a version of this round, or had it last."""
        return self._turn.is_mine

    def pay(self) -> RoundPay:
        """Return what this round pays."""
        if self.agent is None:
            return RoundPay(CREDITS.name, self.member.price_micros_per_mtok)
        worker = self.agent.worker
        price = worker.offers.last_price_micros_per_mtok
        return RoundPay(
            unit=self.agent.member.policies.unit.name,
            price_micros_per_mtok=self.member.price_micros_per_mtok if price is None else price,
            tokens_per_s=worker.tokens_per_s,
            is_new=worker.engine.is_new,
        )

    def pay_for_order(self) -> RoundPay:
        """Return the pay that orders the rounds.

        The speed is the first of this run, so that the order does not waver. The price is at most the node's own with
        the largest bonus: no round pays more, whatever its leases name.
        """
        pay = self.pay()
        if not pay.is_new:
            self._first_speed = self._first_speed or pay.tokens_per_s
        highest = self.member.price_micros_per_mtok * (1 + EXACT_BONUS_MAX)
        price = min(pay.price_micros_per_mtok, highest)
        return pay._replace(price_micros_per_mtok=price, tokens_per_s=self._first_speed)

    def earnings(self) -> RunEarnings:
        """Return the totals of this run."""
        if self.agent is None:
            return RunEarnings(self.join.url, 0, {}, 0, 0, CREDITS.to_json(), str(self.error or ""))
        verdicts, unit = self.agent.verdicts, self.agent.member.policies.unit
        return RunEarnings(
            self.join.url,
            verdicts.accepted,
            verdicts.rejected,
            verdicts.tokens,
            verdicts.credit_micros,
            unit.to_json(),
            str(self.error or ""),
            len(self.agent.outbox),
        )


class AgentRounds:
    """All rounds of an agent, and what its owner sees of them."""

    def __init__(self, rounds: Sequence[AgentRound], background: trio.Nursery) -> None:
        self.all = tuple(rounds)
        self._background = background
        """Runs what goes on after the end of a round."""
        self._has_joined = False

    async def opened(self) -> None:
        """Return when every round is open, or has ended."""
        for one in self.all:
            await one.opened.wait()

    async def ended(self) -> None:
        """Return when every round has ended."""
        for one in self.all:
            await one.ended.wait()

    def order(self, *, best_paid_first: bool) -> tuple[int, ...]:
        """Return the places of the rounds in the owner's list, in the order in which they have the engine."""
        if not best_paid_first:
            return tuple(range(len(self.all)))
        going_on = [number for number, one in enumerate(self.all) if not one.ended.is_set()]
        best = order_by_pay([self.all[number].pay_for_order() for number in going_on])
        ended = (number for number, one in enumerate(self.all) if one.ended.is_set())
        return (*(going_on[place] for place in best), *ended)

    def record_joined(self) -> None:
        """Store the rounds of this node, without those that never accepted it."""
        self._has_joined = True
        member = self.all[0].member
        joins = [one.join for one in self.all if one.is_registered or not one.error]
        last_round.record_joined(member.home, joins, member.given_name, page=member.page)

    def record_left(self, left: AgentRound) -> None:
        """Store that a round may have refused this node, if another one has accepted it, and report it to the owner."""
        if self._has_joined:
            self.record_joined()
        if len(self.all) > 1 and left.agent is not None:
            self._background.start_soon(left.notifier().run)

    def folders(self) -> list[Path]:
        """Return the folder of each round in the home."""
        return [one.folder for one in self.all]

    def shown(self) -> AgentRound:
        """Return the round that the owner sees first: one that works, or else rests; best that with the engine."""
        open_ = [one for one in self.all if one.agent is not None]
        if not open_:
            raise next(one.error for one in self.all if one.error)
        return min(open_, key=lambda one: (one.ended.is_set(), not one.gate.decision.may_work, not one.has_engine))

    def snapshot(self) -> AgentSnapshot:
        """Return the state of the round that is `shown`, with a row for each round if there are several."""
        shown = self.shown()
        assert shown.agent is not None
        snapshot = shown.agent.snapshot()
        if len(self.all) == 1:
            return snapshot
        node_rests = shown.agent.governor.decision.reason_line
        if node_rests:
            snapshot = replace(snapshot, resting=node_rests)
        return replace(snapshot, rounds=[_row(one, shown=one is shown) for one in self.all])

    def status(self) -> dict[str, Any]:
        """Return the current state as plain values."""
        return self.snapshot().to_json()


def _row(one: AgentRound, *, shown: bool) -> dict[str, Any]:
    """Return the state of one of several rounds as plain values."""
    row: dict[str, Any] = {"coordinator": one.join.url, "round_id": one.join.round_id, "shown": shown}
    row |= {
        "by_owner": one.gate.is_ended_by_owner,
        "ended": one.ended.is_set(),
        "error": str(one.error or "")[:ANSWER_TEXT_MAX_CHARS],
    }
    return row | (one.agent.round_row() | one.pay().to_json() if one.agent is not None else {})


async def _return_at_limits(gate: RoundGate, worker: Worker) -> None:
    """Return the running leases whenever a limit takes effect at once."""
    while True:
        if gate.decision.at_once and worker.leases.open:
            await worker.return_open()
        await gate.changes()


async def _drain(sender: Sender, outbox: Outbox, *, retries: bool) -> None:
    """Wait until the last rollouts are sent, for at most `FINAL_SEND_S`; after a failure only with `retries`."""
    with trio.move_on_after(FINAL_SEND_S):
        await sender.flush()
        while retries and len(outbox):
            sender.wake()
            await trio.sleep(0.1)
    if unsent := len(outbox):
        log.warning("finished rollouts wait in the outbox; the next start sends them rollouts=%d", unsent)
