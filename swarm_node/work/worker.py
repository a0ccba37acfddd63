"""The worker: leases, generates, signs and stores groups without pause, then continues with the newest policy.

    OFFLINE ──policy ready──▶ IDLE ──leases──▶ GENERATING ──group by group──▶ (outbox) ──last one──▶ IDLE
                                                   ▲ └──few left: more leases of this version──┐
                                                   └───────────────────────────────────────────┘

- A lease is answered with the policy it names: a newer version waits until the last group of the old one has ended.
- The engine is kept busy: new groups replace ended ones when half have ended, or one by one if groups take long.
- A finished group is signed and on the disk before the next is awaited; sending is the `sender`'s task.
- The `teller` reports the progress of long-running groups; leases that the coordinator no longer needs are dropped.
- A version that is being measured stays in the engine until the coordinator has no more work with it for this node. So
  does the version of an episode, which is a chain of leases: once a newer version is there, requests say `finishing`.
- The sender passes on the next turns of episodes (`take_turns`), and `run` begins them at once, whatever it waits for,
  also for the answer to a request for work: otherwise each turn would cost a second journey. Turns of another version
  are returned.
- Leases that cannot be answered (engine crash, full disk, Ctrl-C) are returned; an unreachable coordinator does not
  interrupt sampling.
- A version with which the engine fails is tried again after a pause, and then skipped: the fault may be in the version.
  The files of the version in the engine, and of the one being loaded, are kept (`hold`).
- The owner's gate is checked before work is requested. While it is closed no group is begun, and the engine is unloaded
  unless the gate opens again soon; `let_go` returns the running leases at once.
- A lease that cannot be completed in time is never begun (`lease_pacing`): it is returned.
- An agent in several rounds has a worker for each, and one engine (`engine_turn`). A worker without work, or without an
  answer for `LEND_AFTER_S`, lends the engine. One whose version is not in the engine any more asks for leases first.
"""

import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import trio

from protocol import limits
from protocol.errors import DiskFull, EngineFailed, LeaseClosed, OwnerBanned, SwarmError, Unreachable
from protocol.ids import LeaseId
from protocol.wire.signing import NodeKey
from protocol.work.lease import Lease
from protocol.work.messages import LeaseReply, LeaseRequest, Reason, ReturnLeases
from protocol.work.rollout import RolloutClaim
from swarm_node.base.trouble import Trouble
from swarm_node.base.waiting import first_of, heard_out
from swarm_node.coordinator_api.client import Coordinator
from swarm_node.engine.client import Choose
from swarm_node.engine.messages import GroupDone, GroupFailed, GroupGrown, SampleRequest
from swarm_node.engine.pool import EnginePool
from swarm_node.engine.throughput import SampleWork
from swarm_node.versions.follower import HeldVersion, PolicyFollower
from swarm_node.work.engine_turn import LEND_AFTER_S, LOOK_AGAIN_S, EngineTurn, EngineTurns
from swarm_node.work.lease_log import Leased
from swarm_node.work.lease_pacing import LeasePacing, NodePace, sort_out
from swarm_node.work.progress_reporter import TELL_S, ProgressReporter
from swarm_node.work.pulse import NO_WORK, Gate, Phase
from swarm_node.work.sender import Outbox, Sender
from swarm_node.work.version_failures import VersionFailures

log = logging.getLogger(__name__)

OUTBOX_MAX = 256
"""Unsent rollouts at which no more work is requested: the coordinator has been unreachable for long."""

LOAD_AGAIN_S = 30.0
"""Pause after a version that could not be loaded, unless a newer one arrives: the version may be at fault."""

FULL_DISK_PAUSE_S = 5.0

DECLINED_PAUSE_S = 30.0
"""Pause after declined leases: the next ones would not be better."""

TURNS_WAITING_MAX = limits.LEASES_PER_REQUEST_MAX
"""Turns that wait until they are begun; more are returned, as the coordinator offers more than this node answered."""

TURN_DUE = "the environments of its episodes have not answered yet; the next turns come by themselves"
"""The reason why a node between two turns has no work."""

TURN_WAIT_S = 60.0
"""Longest wait for the next turn of an episode, without a group in the engine, until another round may use it."""

LAST_WORD_S = 1.0
"""Time-out for a pending answer when the agent stops, and for returning its leases."""

T = TypeVar("T")


class Worker:
    """Worker that turns leases into signed rollouts."""

    def __init__(
        self,
        *,
        coordinator: Coordinator,
        policies: PolicyFollower,
        engine: EnginePool,
        outbox: Outbox,
        leased: Leased,
        sender: Sender,
        teller: ProgressReporter,
        gate: Gate,
        key: NodeKey,
        round_id: str,
        groups_per_request: int,
        price_floor: Callable[[], int] = lambda: 0,
        engine_turn: EngineTurn | None = None,
        choose: Choose | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._policies = policies
        self._engine = engine
        self._outbox, self._leased = outbox, leased
        self._sender = sender
        self._teller = teller
        self._gate = gate
        self._key = key
        self._round_id = round_id
        self._groups_per_card = groups_per_request
        self._appetite = LeasePacing(self._groups_at_once)
        self._price_floor = price_floor
        self._engine_turn = engine_turn or EngineTurns().turn_of(0)
        self._choose = choose
        """Chooses the engine for the versions of this round; None: the pool's choice."""
        self._last_loaded: HeldVersion | None = None
        self._loaded_at = 0
        """The engine had changed hands so often when that was loaded."""
        self._open: dict[str, Lease] = {}
        """Leases in the engine."""
        self._offered = set[str]()
        """Leases that arrived, and were neither begun nor returned yet."""
        self._turns: dict[str, Lease] = {}
        """Leases that `take_turns` got, and `run` has neither begun nor returned yet."""
        self._turns_came = trio.Event()
        """Set while there are such leases."""
        self._storing = ""
        """The lease whose answer is being written to the disk: it is given up only if that fails."""
        self._numerics = ""
        self._continues = False
        """True if the engine can continue samples that another node began."""
        self._failures = VersionFailures()
        self.trouble = Trouble()
        self._samples_done = self._tokens_done = 0
        self._stays = False
        """True while the coordinator may have more work with the loaded version: to measure, or a next turn."""
        self._plays = False
        """True if the last leases that were begun are turns of episodes."""
        self._sampled_at = 0.0
        """Time at which a group was last in the engine."""
        self.idle_for = ""
        """Reason why there is no work, from the coordinator's answer or offer; empty if there is work."""
        self._phase = Phase.OFFLINE
        self.finished = trio.Event()
        """Set when the coordinator says that the round has ended."""

    @property
    def _loaded(self) -> HeldVersion | None:
        """The version in the engine, if it is one of this round."""
        return self._last_loaded if self._engine_turn.changes == self._loaded_at else None

    @property
    def phase(self) -> Phase:
        """Activity in this round; while another round uses the engine, it is a rest."""
        return Phase.RESTING if self._engine_turn.is_used_by_other else self._phase

    @property
    def version(self) -> int:
        """The version in the engine; 0 before the first."""
        return self._loaded.manifest.version if self._loaded else 0

    @property
    def engine_name(self) -> str:
        """Name of the engine; empty before the first version."""
        return self._engine.name if self._loaded else ""

    @property
    def open_leases(self) -> int:
        """Number of groups in the engine."""
        return len(self._open)

    @property
    def tokens_per_s(self) -> float:
        """The sum of the speeds of all cards; 0 before the first measurement."""
        return self._engine.tokens_per_s

    def _groups_at_once(self) -> int:
        """Return the number of groups for all cards together, within the protocol's limit of one request."""
        return min(self._groups_per_card * self._engine.cards_ready, limits.LEASES_PER_REQUEST_MAX)

    async def run(self) -> None:
        """Work until the round is finished."""
        try:
            while not self.finished.is_set():
                try:
                    if self._turns:
                        await self._begin_turns()
                    if self._is_hungry():
                        await self._take_work()
                    if self._open:
                        await self._collect()
                except EngineFailed as error:
                    await self._give_up()
                    self._count_failure(error, self._loaded)
                except DiskFull as error:
                    self.trouble.met(error, "work stopped")
                    await self._give_up()
                    self._appetite.pause(FULL_DISK_PAUSE_S)
                except Unreachable:  # the heartbeat logs this
                    self._appetite.pause(1.0)
                except OwnerBanned:
                    raise
                except SwarmError as error:
                    self.trouble.met(error, "no work")
                    self._appetite.pause(1.0)
        finally:
            turns, self._turns = self._turns, {}
            await self._give_back([*self._open, *sorted(self._offered), *turns])
            self._engine_turn.leave()

    def _is_hungry(self) -> bool:
        """Return True if work should be requested: nothing runs, or there is capacity for more of the same version."""
        if not self._open:
            return True
        return (
            self._gate.decision.may_work
            and len(self._outbox) < OUTBOX_MAX
            and self._appetite.is_due(len(self._open))
            and self._next_now() == self._loaded
            and not self._engine_turn.must_leave
        )

    def _next_now(self) -> HeldVersion | None:
        """Return the version to sample with next, if known: the newest, or the loaded one while it is needed."""
        newest = self._policies.usable_now()
        return self._loaded if newest is not None and self._stays else newest

    async def take_turns(self, leases: Sequence[Lease]) -> None:
        """Hand leases of next turns to `run`, which begins them; return those that it could not begin.

        Called by the sender while `run` continues.
        """
        declined = []
        for lease in leases:
            if lease.lease_id in self._open or lease.lease_id in self._offered or lease.lease_id in self._turns:
                continue
            if self._takes(lease) and len(self._turns) < TURNS_WAITING_MAX:
                self._turns[lease.lease_id] = lease
            else:
                declined.append(lease.lease_id)
        if self._turns:
            self._turns_came.set()
        await self._give_back(declined)

    def _takes(self, lease: Lease) -> bool:
        """Return True if a turn may be begun: with the loaded version, and while work is permitted."""
        may_work = self._gate.decision.may_work and not self._engine_turn.is_overdue
        return lease.version == self.version and may_work and not self.finished.is_set()

    async def _begin_turns(self) -> None:
        """Begin the turns that `take_turns` got, and return those of another version, or after the gate has closed."""
        turns, begins = tuple(self._turns.values()), set(self._turns)
        self._offered |= begins
        self._turns, self._turns_came = {}, trio.Event()
        fit = [lease for lease in turns if self._takes(lease)]
        await self._give_back([lease.lease_id for lease in turns if lease not in fit])
        begun = await self._begin(fit)
        self._offered -= begins
        if begun and self._loaded is not None:
            await self._sample(begun, self._loaded)

    async def _first_of(self, *waits: Callable[[], Awaitable[T]]) -> T | None:
        """Return the result of the first wait; None if the gate closes or a turn comes before that."""
        return await first_of(*waits, self._gate.closed, self._turns_came.wait)

    async def _take_work(self) -> None:
        """Lease groups and pass them to the engine, in addition to running groups of the same version."""
        if not self._open:
            if self._engine_turn.must_leave or self._appetite.pause_s:
                self._leave_engine()
            if not self._gate.decision.may_work:
                return await self._rest()
            self._phase = Phase.IDLE if self._loaded else Phase.OFFLINE
            await self._first_of(partial(trio.sleep, self._appetite.pause_s))
        if (policy := self._next_now()) is None:  # see `_is_hungry`
            self._leave_engine()
            policy = await self._first_of(self._policies.usable)
        if policy is None or self._turns:
            return None
        if not self._open and not (self._engine_turn.is_mine and self._engine_turn.try_take()):
            await self._work_beside(policy)
        elif self._failures.is_unusable(policy) and not self._open:
            self._last_loaded = None
            await self._engine.rest()
            self._engine_turn.leave()
            await self._wait_for_newer(policy, math.inf)
        elif policy != self._loaded and not self._open:
            await self._load_or_wait(policy)
        elif len(self._outbox) >= OUTBOX_MAX:
            self._appetite.pause(1.0)
        elif policy == self._loaded and (leases := await self._lease(policy)):
            await self._sample(leases, policy)
        return None

    async def _work_beside(self, policy: HeldVersion) -> None:
        """Request work for a version that is not in the engine, which another round has; sample what is offered."""
        self._stays = False
        if self._failures.is_unusable(policy):
            await self._wait_for_newer(policy, math.inf)
        elif not self._numerics:  # leases are given for a class of numerics, which the first load shows
            await self._first_of(self._engine_turn.take)
        elif self._engine_turn.is_used_before:
            await self._first_of(self._engine_turn.unused_before)
        elif len(self._outbox) >= OUTBOX_MAX:
            self._appetite.pause(1.0)
        elif leases := await self._lease(policy):
            await self._sample(leases, policy)

    def _leave_engine(self) -> None:
        """Let another round use the engine, unless the next turn of an episode is due."""
        is_late = self._engine_turn.is_overdue or trio.current_time() >= self._sampled_at + TURN_WAIT_S
        if is_late or not (self._stays and self._plays):
            self._engine_turn.leave()

    async def _prepare_engine(self, leases: Sequence[Lease], policy: HeldVersion) -> tuple[Lease, ...]:
        """Take the engine, and load the version of these leases; return those that can be begun then.

        The leases are returned to the coordinator if an earlier round uses the engine first, or if the load fails.
        """
        if self._engine_turn.try_take() and self._loaded == policy:
            return tuple(leases)
        waiting = {lease.lease_id for lease in leases}
        self._offered |= waiting
        took = await self._first_of(self._engine_turn.take_unless_used)
        if took and self._loaded != policy and not await self._load_or_wait(policy, waiting):
            return ()
        if not took:
            await self._give_back(sorted(waiting))
            return ()
        begun = await self._begin(leases)
        self._offered -= waiting
        return begun

    async def _load_or_wait(self, policy: HeldVersion, leases: Collection[str] = ()) -> bool:
        """Load a version; if that fails, return its `leases`, wait for a newer version or a while, and return False."""
        try:
            await self._load(policy)
        except EngineFailed as error:
            self._last_loaded = None
            await self._give_back(sorted(leases))
            self._count_failure(error, policy)
            self._engine_turn.leave()
            await self._wait_for_newer(policy, LOAD_AGAIN_S)
            return False
        if self._loaded != policy:  # it became too old before it could be loaded
            await self._give_back(sorted(leases))
        return self._loaded == policy

    async def _sample(self, leases: Sequence[Lease], policy: HeldVersion) -> None:
        """Pass leases to the engine, once this round has it with their version."""
        if not (leases := await self._prepare_engine(leases, policy)):
            return
        self._phase = Phase.GENERATING
        self._plays = _has_turns(leases)
        self._stays |= self._plays  # until the coordinator knows of no next turn
        self._open |= {lease.lease_id: lease for lease in leases}
        for lease in leases:
            self._teller.start(lease)
        sampler = policy.manifest.sampler
        await self._engine.submit([SampleRequest.from_lease(lease, sampler, tell_every_s=TELL_S) for lease in leases])

    async def _rest(self) -> None:
        """Wait while the gate is closed; a finishing node has finished when no lease is open."""
        if self._gate.finishing:
            self.finished.set()
            return
        self._phase = Phase.RESTING
        if not self._gate.decision.keep_engine and self._engine_turn.try_take():
            self._last_loaded = None
            await self._engine.rest()
        self._engine_turn.leave()
        await first_of(self._gate.opened, self._turns_came.wait)

    async def let_go(self) -> None:
        """Return the leases that are being sampled; called while `run` continues."""
        await self._give_up(but=self._storing)

    async def _wait_for_newer(self, policy: HeldVersion, patience_s: float) -> None:
        """Wait for another version, for at most `patience_s`, or until the gate closes or a turn comes."""
        await self._first_of(partial(self._policies.newer_than, policy, patience_s=patience_s))

    async def _collect(self, interrupted: trio.Event | None = None) -> None:
        """Await the next group; sign and store it. Return without one if a turn comes, or `interrupted` is set."""
        group = await self._engine.finished(self._turns_came if interrupted is None else interrupted)
        lease = self._open.get(group.request_id) if group else None
        if group is None or lease is None:
            return  # it was given up, or a turn came
        if isinstance(group, GroupGrown):
            return self._teller.grew(lease.lease_id, group.parts)
        if isinstance(group, GroupFailed):
            self._close(lease)
            await self._give_back([lease.lease_id])
            return self._count_failure(SwarmError.from_wire(group.model_dump()), self._loaded)
        self._policies.milestones.passed(lease.version, "first_token", ago_s=group.first_token_ago_s)
        self._storing = lease.lease_id
        await trio.to_thread.run_sync(self._outbox.put, LeaseId(lease.lease_id), self._sign(lease, group))
        self._close(lease)
        self._storing = ""
        self._sender.wake()
        self._failures.over()
        self.trouble.over()
        self._samples_done += len(group.samples)
        self._tokens_done += sum(len(sample.tokens) // 4 for sample in group.samples)

    def _close(self, lease: Lease) -> None:
        """Forget a lease that the engine no longer samples."""
        self._open.pop(lease.lease_id, None)  # it may have been dropped meanwhile
        self._sampled_at = trio.current_time()
        self._teller.forget(lease.lease_id)

    async def drop(self, lease_ids: Collection[str]) -> None:
        """Stop sampling leases that the coordinator no longer needs; called while `run` awaits the engine."""
        gone = self._open.keys() & set(lease_ids)
        for lease_id in gone:
            self._close(self._open[lease_id])
        with suppress(EngineFailed):  # `run` detects that by itself
            await self._engine.cancel(gone)

    def _count_failure(self, error: SwarmError, policy: HeldVersion | None) -> None:
        """Count a failure of the engine with this version, and pause or give up."""
        if shown := self._failures.count(error, policy):
            self.trouble.show(shown)
            self._appetite.pause(self._failures.pause_s)

    async def _load(self, policy: HeldVersion) -> None:
        if not self._policies.hold_versions(policy, self._loaded):
            return  # it became too old before it could be loaded
        self._last_loaded = None
        warm_up = SampleWork.first(policy.manifest.task, policy.manifest.sampler)
        self._loaded_at = self._engine_turn.changes
        loaded = await self._engine.load(policy.folder, policy.manifest.version, warm_up, self._choose)
        self._last_loaded, self._numerics, self._continues = policy, loaded.numerics, loaded.continues
        self._policies.hold_versions(policy)
        self._policies.milestones.passed(policy.manifest.version, "loaded")
        update = policy.manifest.update
        log.info("version loaded version=%d update=%d seconds=%.2f", self.version, update, loaded.seconds)

    async def _lease(self, policy: HeldVersion) -> tuple[Lease, ...]:
        if not self._open:
            await self._sender.begun()  # a caller may wait for the last rollout
        newest = self._policies.usable_now()
        request = LeaseRequest(
            version=policy.manifest.version,
            groups=self._appetite.room(len(self._open)),
            continues=self._continues,
            finishing=(newest is not None and newest != policy) or (self._stays and self._engine_turn.must_leave),
            numerics=self._numerics,
        )
        reply, new = await self._ask_beside_turns(request)
        self._appetite.record_request()
        self._policies.hint(reply.newest_version)
        self._stays = reply.stays or _has_turns(self._open.values())  # an open turn may have a next one
        if not len(new) == len(reply.leases) <= request.groups or any(
            lease.version != request.version for lease in reply.leases
        ):
            await self._give_back(sorted(new))
            raise LeaseClosed("The coordinator offers leases that this node did not ask for, or one of them twice.")
        if reply.reason == "finished":
            self.finished.set()
        elif not reply.leases:
            self._say_why(reply.reason)
            patience_s = min(max(reply.retry_s, 0.05 if self._engine_turn.is_mine else LOOK_AGAIN_S), 30.0)
            if not self._open:
                self._leave_engine()
            if self._open:
                self._appetite.refused(patience_s)
            elif request.finishing and self._stays:  # the newer version is there already, and waits
                await self._first_of(partial(trio.sleep, patience_s))
            else:
                await self._wait_for_newer(policy, patience_s)
        begun = await self._begin(reply.leases)
        self._offered -= new
        return begun

    async def _ask_beside_turns(self, request: LeaseRequest) -> tuple[LeaseReply, set[str]]:
        """Request leases, and return the answer with the new leases' ids.

        Before it comes, begin the turns that come, and after a while collect the groups that end, and lend the engine.
        """
        answers: list[tuple[LeaseReply, set[str]]] = []
        failed: list[Exception] = []
        answered = trio.Event()

        async def ask() -> None:
            try:
                answers.append(await heard_out(partial(self._ask, request), patience_s=LAST_WORD_S))
            except Exception as error:  # raised below, outside of the nursery, which would wrap it
                failed.append(error)
            finally:
                answered.set()
            nursery.cancel_scope.cancel()

        async def begin_turns() -> None:
            while not failed:
                await self._turns_came.wait()
                with trio.CancelScope(shield=True):  # leases that are half begun would be lost
                    try:
                        await self._begin_turns()
                    except Exception as error:  # raised below, when the answer is there
                        failed.append(error)

        async def lend() -> None:
            await trio.sleep(LEND_AFTER_S)
            with trio.CancelScope(shield=True):  # a cancelled wait would end the engine
                try:
                    while self._open and not self._plays and not (answered.is_set() or failed):
                        await self._collect(answered)
                except Exception as error:  # raised below, when the answer is there
                    failed.append(error)
            if not self._open:
                self._leave_engine()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            nursery.start_soon(begin_turns)
            nursery.start_soon(lend)
        if failed:
            await self._give_back(sorted(self._offered))
            raise failed[0]
        return answers[0]

    async def _ask(self, request: LeaseRequest) -> tuple[LeaseReply, set[str]]:
        reply = await self._coordinator.lease(request)
        known = self._open.keys() | self._turns.keys() | self._offered
        new = {lease.lease_id for lease in reply.leases} - known
        self._offered |= new
        return reply, new

    async def _begin(self, offered: Sequence[Lease]) -> tuple[Lease, ...]:
        """Return the leases that this node begins; the others are returned to the coordinator at once."""
        if not offered:
            return ()
        if self._gate.decision.at_once:
            await self._give_back([lease.lease_id for lease in offered])
            return ()
        pace = NodePace(self.tokens_per_s, self._tokens_done / max(1, self._samples_done))
        offer = sort_out(offered, now_ms=self._coordinator.now_ms(), pace=pace, price_floor=self._price_floor())
        if offer.declined:
            if not self.idle_for:
                log.warning("leases declined count=%d: %s", len(offer.declined), offer.why)
            await self._give_back(list(offer.declined))
            self._appetite.pause(DECLINED_PAUSE_S)
        self.idle_for = "" if offer.begun else offer.why
        if offer.begun:
            try:
                await trio.to_thread.run_sync(self._leased.keep, offer.begun)
            except (DiskFull, LeaseClosed):
                await self._give_back([lease.lease_id for lease in offer.begun])
                raise
        return offer.begun

    def _say_why(self, reason: Reason) -> None:
        """Log why there is no work, when the reason changes; a next turn that is due is no reason to log."""
        if reason not in NO_WORK and self.idle_for in ("", TURN_DUE):
            self.idle_for = TURN_DUE if self._stays and self._plays else ""
        elif reason in NO_WORK and self.idle_for != NO_WORK[reason]:
            log.warning("no work: %s", NO_WORK[reason])
            self.idle_for = NO_WORK[reason]

    async def _give_up(self, *, but: str = "") -> None:
        """Cancel and return all leases that are being sampled."""
        self._stays = False  # the files of an older version may have been deleted
        lost = [lease_id for lease_id in self._open if lease_id != but]
        for lease_id in lost:
            self._close(self._open[lease_id])
        with suppress(EngineFailed):  # a new child does not have them anyway
            await self._engine.cancel(lost)
        await self._give_back(lost)

    def _sign(self, lease: Lease, group: GroupDone) -> bytes:
        claim = RolloutClaim(
            round_id=self._round_id, lease_id=lease.lease_id, lease_digest=lease.digest, samples=group.samples
        )
        return self._key.seal("rollout", claim.to_bytes())

    async def _give_back(self, lease_ids: list[str]) -> None:
        """Return leases, as best effort, even while being cancelled: other leases only expire later."""
        if not lease_ids:
            return
        self._offered.difference_update(lease_ids)
        with trio.CancelScope(shield=True, deadline=trio.current_time() + LAST_WORD_S):
            try:
                await self._coordinator.give_back(ReturnLeases(lease_ids=tuple(lease_ids)))
            except SwarmError as error:
                log.info("cannot return %d leases; they will expire (%s)", len(lease_ids), error.code)


def _has_turns(leases: Iterable[Lease]) -> bool:
    """Return True if a lease is a turn of an episode."""
    return any(lease.turn_tokens_max for lease in leases)
