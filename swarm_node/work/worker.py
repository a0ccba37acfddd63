"""The worker: leases, samples, signs and stores groups without pause, then continues with the newest policy.

    OFFLINE ──policy ready──▶ IDLE ──leases──▶ GENERATING ──group by group──▶ (outbox) ──last one──▶ IDLE
                                                   ▲ └──few left: more leases of this version──┐
                                                   └───────────────────────────────────────────┘

- A lease is answered with the policy it names: a newer version waits until the last group of the old one has ended.
- The engine is kept busy: new groups replace ended ones when half have ended, or one by one if groups take long.
- A finished group is signed and on the disk before the next is awaited (`RolloutWriter`).
- `held_leases` has the state of each lease, `round_engine` the version in the engine, `lease_offers` what is requested
  and accepted. Only `run` starts leases; the other public methods are called while it continues.
- The reporter reports the progress of long-running groups; leases that the coordinator no longer needs are cancelled.
- A version that is being measured stays in the engine until the coordinator has no more work with it for this node. So
  does the version of an episode, which is a chain of leases: once a newer version is there, requests say `finishing`.
- The sender passes on the next turns of episodes (`add_turns`), and `run` starts them at once, whatever it waits for,
  also for the reply to a request for work, beside which turns that end are stored, too: otherwise each turn would cost
  a second journey. Turns of another version are returned.
- Leases that cannot be answered (engine crash, full disk, Ctrl-C) are returned; an unreachable coordinator does not
  interrupt sampling.
- A version with which the engine fails is tried again after a pause, and then skipped: the fault may be in the version.
- The owner's gate is checked before work is requested. While it is closed no group is started, and the engine is
  unloaded unless the gate opens again soon; `return_open` returns the running leases at once.
- An agent in several rounds has a worker for each, and one engine (`engine_turn`). A worker without work, or without a
  reply for `LEND_AFTER_S`, lends the engine. One whose version is not in the engine any more requests leases first.
"""

import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import trio

from protocol.errors import DiskFull, EngineFailed, OwnerBanned, SwarmError, Unreachable
from protocol.work.lease import Lease
from protocol.work.messages import LeaseReply, LeaseRequest
from swarm_node.base.trouble import Trouble
from swarm_node.base.waiting import EitherEvent, Interrupt, Stoppable, finish_when_cancelled, first_of
from swarm_node.engine.messages import GroupFailed, GroupGrown, SampleRequest
from swarm_node.versions.fetcher import HeldVersion
from swarm_node.versions.follower import PolicyFollower
from swarm_node.work.engine_turn import LEND_AFTER_S, REQUEST_AGAIN_S
from swarm_node.work.held_leases import HeldLeases
from swarm_node.work.lease_offers import LeaseOffers
from swarm_node.work.progress_reporter import REPORT_EVERY_S, ProgressReporter
from swarm_node.work.pulse import Gate, Phase
from swarm_node.work.round_engine import RoundEngine, VersionFailures
from swarm_node.work.sender import RolloutWriter, Sender

LOAD_AGAIN_S = 30.0
"""Pause after a version that could not be loaded, unless a newer one arrives: the version may be at fault."""

FULL_DISK_PAUSE_S = 5.0

TURN_WAIT_S = 60.0
"""Longest wait for the next turn of an episode, without a group in the engine, until another round may use it."""

LAST_REPLY_S = 1.0
"""Time-out for a pending reply when the agent stops: it may have leases, which are returned."""

T = TypeVar("T")


class Worker:
    """Worker that turns leases into signed rollouts."""

    def __init__(
        self,
        *,
        policies: PolicyFollower,
        engine: RoundEngine,
        leases: HeldLeases,
        offers: LeaseOffers,
        writer: RolloutWriter,
        sender: Sender,
        reporter: ProgressReporter,
        gate: Gate,
    ) -> None:
        self._policies = policies
        self.engine = engine
        self.leases = leases
        self.offers = offers
        self._pacing = offers.pacing
        self._writer = writer
        self._sender = sender
        self._reporter = reporter
        self._gate = gate
        self._failures = VersionFailures()
        self.trouble = Trouble()
        self._stays = False
        """True while the coordinator may have more work with the loaded version: to measure, or a next turn."""
        self._phase = Phase.OFFLINE
        self.finished = trio.Event()
        """Set when the coordinator says that the round has ended."""
        self._running = Stoppable()

    @property
    def phase(self) -> Phase:
        """Activity in this round; while another round uses the engine, it is a rest."""
        return Phase.RESTING if self.engine.turn.is_used_by_other else self._phase

    @property
    def version(self) -> int:
        """The version in the engine; 0 before the first."""
        return self.engine.version

    @property
    def tokens_per_s(self) -> float:
        """The sum of the speeds of all cards with this round's model; 0 before the first measurement."""
        return self.engine.tokens_per_s

    async def run(self) -> None:
        """Work until the round is finished, or `stop` is called."""
        await self._running.run(self._run, self._end)

    async def stop(self) -> None:
        """End `run`, and return the leases that it has not answered; what is stored stays in the outbox."""
        await self._running.stop()

    async def _end(self) -> None:
        await self.leases.return_all()
        self.engine.turn.release()

    async def _run(self) -> None:
        while not self.finished.is_set():
            try:
                if self.leases.has_turns:
                    await self._start_turns()
                if self._needs_work():
                    await self._request_work()
                if self.leases.open:
                    await self._collect()
            except EngineFailed as error:
                await self.return_open()
                self._count_failure(error, self.engine.loaded)
            except DiskFull as error:
                self.trouble.record(error, "work stopped")
                await self.return_open()
                self._pacing.pause(FULL_DISK_PAUSE_S)
            except Unreachable:  # the heartbeat logs this
                self._pacing.pause(1.0)
            except OwnerBanned:
                raise
            except SwarmError as error:
                self.trouble.record(error, "no work")
                self._pacing.pause(1.0)

    async def add_turns(self, leases: Sequence[Lease]) -> None:
        """Hand leases of next turns to `run`, which starts them; return those that it could not start."""
        declined = []
        for lease in leases:
            if self.leases.is_held(lease.lease_id):
                continue
            if not (self._can_start_turn(lease) and self.leases.add_turn(lease)):
                declined.append(lease.lease_id)
        await self.leases.return_leases(declined)

    async def cancel(self, lease_ids: Collection[str]) -> None:
        """Stop sampling leases that the coordinator no longer needs."""
        unneeded = self.leases.open.keys() & set(lease_ids)
        for lease_id in unneeded:
            self.leases.close(lease_id)
        with suppress(EngineFailed):  # `run` detects that by itself
            await self.engine.pool.cancel(unneeded)

    async def return_open(self) -> None:
        """Cancel and return the leases that are being sampled; one whose rollout is being stored is answered."""
        self._stays = False  # the files of an older version may have been deleted
        lost = [lease_id for lease_id in self.leases.open if lease_id != self._writer.storing]
        for lease_id in lost:
            self.leases.close(lease_id)
        with suppress(EngineFailed):  # a new child does not have them anyway
            await self.engine.pool.cancel(lost)
        await self.leases.return_leases(lost)

    def _needs_work(self) -> bool:
        """Return True if work should be requested: nothing runs, or there is capacity for more of the same version."""
        if not self.leases.open:
            return True
        return (
            self._gate.decision.may_work
            and not self._writer.is_full
            and self._pacing.is_due(len(self.leases.open))
            and self._next_version() == self.engine.loaded
            and not self.engine.turn.must_release
        )

    def _next_version(self) -> HeldVersion | None:
        """Return the version to sample with next, if known: the newest, or the loaded one while it is needed."""
        newest = self._policies.usable_now()
        return self.engine.loaded if newest is not None and self._stays else newest

    async def _request_work(self) -> None:
        """Lease groups and pass them to the engine, in addition to running groups of the same version."""
        engine = self.engine
        if not self.leases.open:
            if engine.turn.must_release or self._pacing.pause_s:
                self._release_engine()
            if not self._gate.decision.may_work:
                return await self._rest()
            self._phase = Phase.IDLE if engine.loaded else Phase.OFFLINE
            await self._first_of(partial(trio.sleep, self._pacing.pause_s))
        if (policy := self._next_version()) is None:  # not while groups run, see `_needs_work`
            self._release_engine()
            policy = await self._first_of(self._policies.usable)
        if policy is None or self.leases.has_turns:
            return None
        runs = bool(self.leases.open)
        if not runs and not (engine.turn.is_mine and engine.turn.try_acquire()):
            await self._request_without_engine(policy)
        elif not runs and self._failures.is_unusable(policy):
            await engine.unload()
            engine.turn.release()
            await self._wait_for_newer(policy, math.inf)
        elif not runs and policy != engine.loaded:
            await self._load_or_wait(policy)
        elif self._writer.is_full:
            self._pacing.pause(1.0)
        elif policy == engine.loaded:
            await self._lease_and_start(policy)
        return None

    async def _request_without_engine(self, policy: HeldVersion) -> None:
        """Request work for a version that is not in the engine, which another round has; start what is offered."""
        self._stays = False
        if self._failures.is_unusable(policy):
            await self._wait_for_newer(policy, math.inf)
        elif not self.engine.numerics:  # leases are given for a class of numerics, which the first load shows
            await self._first_of(self.engine.turn.acquire)
        elif self.engine.turn.is_used_before:
            await self._first_of(self.engine.turn.unused_before)
        elif self._writer.is_full:
            self._pacing.pause(1.0)
        else:
            await self._lease_and_start(policy)

    async def _lease_and_start(self, policy: HeldVersion) -> None:
        """Lease groups of a version, and start those that are accepted."""
        if not self.leases.open:
            await self._sender.begun()  # a caller may wait for the last rollout
        newest = self._policies.usable_now()
        request = LeaseRequest(
            version=policy.manifest.version,
            groups=self._pacing.free_groups(len(self.leases.open)),
            continues=self.engine.continues,
            finishing=(newest is not None and newest != policy) or (self._stays and self.engine.turn.must_release),
            numerics=self.engine.numerics,
        )
        had_turn = self.leases.has_open_turn
        reply = await self._request_beside_work(request)
        self._policies.hint(reply.newest_version)
        self._stays = reply.stays or had_turn or self.leases.has_open_turn  # which may have a next one
        if reply.reason == "finished":
            self.finished.set()
        elif not reply.leases:
            await self._wait_without_work(reply, request, policy, runs=had_turn or bool(self.leases.open))
        await self._start(await self.offers.accept(reply.leases), policy)

    async def _wait_without_work(
        self, reply: LeaseReply, request: LeaseRequest, policy: HeldVersion, *, runs: bool
    ) -> None:
        """Record why the coordinator offers nothing, and wait before the next request, unless a group `runs` or ran."""
        self.offers.record_no_work(reply.reason, turn_due=self._stays and self.leases.plays)
        patience_s = min(max(reply.retry_s, 0.05 if self.engine.turn.is_mine else REQUEST_AGAIN_S), 30.0)
        if runs:
            self._pacing.pause_additional(patience_s)
            return
        self._release_engine()
        if request.finishing and self._stays:  # the newer version is there already, and waits
            await self._first_of(partial(trio.sleep, patience_s))
        else:
            await self._wait_for_newer(policy, patience_s)

    async def _request_beside_work(self, request: LeaseRequest) -> LeaseReply:
        """Request leases, and return the reply; before it comes, other work goes on."""
        replies: list[LeaseReply] = []
        failed: list[Exception] = []
        answered = trio.Event()

        async def ask() -> None:
            try:
                replies.append(
                    await finish_when_cancelled(partial(self.offers.request, request), patience_s=LAST_REPLY_S)
                )
            except Exception as error:  # raised below, outside of the nursery, which would wrap it
                failed.append(error)
            finally:
                answered.set()

        async def go_on() -> None:
            with trio.CancelScope(shield=True):  # leases that are half started would be lost, and a wait end the engine
                try:
                    await self._go_on_until(answered)
                except Exception as error:  # raised below, when the reply is there
                    failed.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            nursery.start_soon(go_on)
        if failed:
            await self.leases.return_offered()
            raise failed[0]
        return replies[0]

    async def _go_on_until(self, answered: trio.Event) -> None:
        """Start the turns that come, and collect those that end; after a while any group, and lend the engine."""
        lends_at = trio.current_time() + LEND_AFTER_S
        while not answered.is_set():
            is_late = trio.current_time() >= lends_at
            if self.leases.has_turns:
                await self._start_turns()
            elif self.leases.open and (self.leases.plays or is_late):
                await self._collect(EitherEvent(answered, self.leases.turns_came))
            else:
                if is_late and not self.leases.open:
                    self._release_engine()
                with trio.move_on_at(math.inf if is_late else lends_at):
                    await first_of(answered.wait, self.leases.turns_came.wait)

    def _can_start_turn(self, lease: Lease) -> bool:
        """Return True if a turn may be started: with the loaded version, and while work is permitted."""
        may_work = self._gate.decision.may_work and not self.engine.turn.is_overdue
        ends = self.finished.is_set() or self._running.is_stopped
        return lease.version == self.engine.version and may_work and not ends

    async def _start_turns(self) -> None:
        """Start the turns that wait; return those of another version, or all after the gate has closed."""
        turns = self.leases.offer_turns()
        fit = [lease for lease in turns if self._can_start_turn(lease)]
        await self.leases.return_leases([lease.lease_id for lease in turns if lease not in fit])
        accepted = await self.offers.accept(fit)
        if self.engine.loaded is not None:
            await self._start(accepted, self.engine.loaded)
        else:
            await self.leases.return_leases([lease.lease_id for lease in accepted])

    async def _start(self, leases: Sequence[Lease], policy: HeldVersion) -> None:
        """Pass accepted leases to the engine, once this round has it with their version."""
        if leases and not (self.engine.turn.try_acquire() and self.engine.loaded == policy):
            leases = await self._prepare_engine(leases, policy)
        if not leases:
            return
        self._phase = Phase.GENERATING
        self.leases.start(leases)
        self._stays |= self.leases.plays  # until the coordinator knows of no next turn
        sampler = policy.manifest.sampler
        requests = [SampleRequest.from_lease(lease, sampler, report_every_s=REPORT_EVERY_S) for lease in leases]
        await self.engine.pool.submit(requests)

    async def _prepare_engine(self, leases: Sequence[Lease], policy: HeldVersion) -> Sequence[Lease]:
        """Wait for the engine, and load the version of these leases; return those that are still accepted then.

        The leases are returned to the coordinator if an earlier round uses the engine first, or if the load fails.
        """
        lease_ids = sorted(lease.lease_id for lease in leases)
        if not await self._first_of(self.engine.turn.acquire_unless_used):
            await self.leases.return_leases(lease_ids)
            return ()
        if self.engine.loaded != policy and not await self._load_or_wait(policy, lease_ids):
            return ()
        return await self.offers.accept(leases)

    async def _load_or_wait(self, policy: HeldVersion, lease_ids: Collection[str] = ()) -> bool:
        """Load a version. Without success return its leases, after a failure wait for a newer version or a while."""
        try:
            if await self.engine.load(policy):
                return True
            await self.leases.return_leases(lease_ids)
        except EngineFailed as error:
            await self.leases.return_leases(lease_ids)
            self._count_failure(error, policy)
            self.engine.turn.release()
            await self._wait_for_newer(policy, LOAD_AGAIN_S)
        return False

    async def _collect(self, interrupted: Interrupt | None = None) -> None:
        """Await the next group; sign and store it. Return without one if a turn comes, or `interrupted` is set."""
        group = await self.engine.pool.finished(self.leases.turns_came if interrupted is None else interrupted)
        lease = self.leases.open.get(group.request_id) if group else None
        if group is None or lease is None:
            return  # a turn came, or the lease was cancelled
        if isinstance(group, GroupGrown):
            self._reporter.add_tokens(lease.lease_id, group.parts)
        elif isinstance(group, GroupFailed):
            self.leases.close(lease.lease_id)
            await self.leases.return_leases([lease.lease_id])
            self._count_failure(SwarmError.from_wire(group.model_dump()), self.engine.loaded)
        else:
            self._policies.milestones.passed(lease.version, "first_token", ago_s=group.first_token_ago_s)
            await self._writer.write(lease, group)
            self.leases.close(lease.lease_id)
            self._failures.reset()
            self.trouble.clear()

    def _count_failure(self, error: SwarmError, policy: HeldVersion | None) -> None:
        """Count a failure of the engine with this version, and pause or give up."""
        if shown := self._failures.count(error, policy):
            self.trouble.show(shown)
            self._pacing.pause(self._failures.pause_s)

    async def _rest(self) -> None:
        """Wait while the gate is closed; a finishing node has finished when no lease is open."""
        if self._gate.finishing:
            self.finished.set()
            return
        self._phase = Phase.RESTING
        engine_is_ours = self.engine.turn.is_mine and self.engine.turn.try_acquire()
        if engine_is_ours and not self._gate.decision.keep_engine:
            await self.engine.unload()
        self.engine.turn.release()
        await first_of(self._gate.opened, self.leases.turns_came.wait)

    def _release_engine(self) -> None:
        """Let another round use the engine, unless the next turn of an episode is due."""
        is_late = self.engine.turn.is_overdue or trio.current_time() >= self.leases.closed_at + TURN_WAIT_S
        if is_late or not (self._stays and self.leases.plays):
            self.engine.turn.release()

    async def _wait_for_newer(self, policy: HeldVersion, patience_s: float) -> None:
        """Wait for another version, for at most `patience_s`, or until the gate closes or a turn comes."""
        await self._first_of(partial(self._policies.newer_than, policy, patience_s=patience_s))

    async def _first_of(self, *waits: Callable[[], Awaitable[T]]) -> T | None:
        """Return the result of the first wait; None if the gate closes or a turn comes before that."""
        return await first_of(*waits, self._gate.closed, self.leases.turns_came.wait)
