"""The worker: lease, generate, sign, store; without a pause while the version stays, then with the newest policy.

    OFFLINE ──policy ready──▶ IDLE ──leases──▶ GENERATING ──group by group──▶ (outbox) ──last one──▶ IDLE
                                                   ▲ └──few left: more leases of this version──┐
                                                   └───────────────────────────────────────────┘

- A lease is answered with the policy it names: a newer version waits until the last group of the old one has ended.
- The engine never runs dry in between: others are leased in place of groups that have ended, when half have, or with
  every one that ends where they take long.
- A finished group is signed and on the disk before the next is awaited; sending is the `sender`'s task.
- What the engine says of groups that take long is told by the `teller`; what the coordinator needs no more is dropped.
- A version that is measured stays in the engine until the coordinator has no more of it for this node.
- What cannot be answered (engine crash, full disk, Ctrl-C) is given back; a coordinator that is away costs nothing that
  is being sampled.
- A version with which the engine fails is tried again after a while, and then left for the next one: the fault may be
  its own. The files of the version in the engine, and of the one on its way into it, stay (`hold`).
- The owner's gate is looked at before work is asked for. While it is closed nothing is begun, and the engine leaves the
  memory unless the gate opens again soon; `let_go` gives back at once what is being sampled.
- A lease that cannot be met is never begun (`feasible`): it goes back, declared.
"""

import logging
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial

import trio

from protocol.errors import (
    DiskFull,
    EngineFailed,
    EngineNotStarted,
    LeaseClosed,
    OwnerBanned,
    SwarmError,
    Unreachable,
)
from protocol.ids import LeaseId
from protocol.tasks import environments
from protocol.wire.signing import NodeKey
from protocol.work.lease import Lease
from protocol.work.messages import LeaseReply, LeaseRequest, Reason, ReturnLeases
from protocol.work.rollout import RolloutClaim
from swarm_node.base.trouble import Trouble
from swarm_node.base.waiting import first_of, heard_out
from swarm_node.coordinator_api.client import Coordinator
from swarm_node.engine.client import EngineClient
from swarm_node.engine.messages import GroupDone, GroupFailed, GroupGrown, SampleRequest
from swarm_node.versions.follower import HeldVersion, PolicyFollower
from swarm_node.work.activity import NO_WORK, Gate, Phase
from swarm_node.work.lease_log import Leased
from swarm_node.work.lease_pacing import LeasePacing, NodePace, sort_out
from swarm_node.work.outbox import Outbox
from swarm_node.work.progress_reporter import TELL_S, ProgressReporter
from swarm_node.work.sender import Sender
from swarm_node.work.throughput import SampleWork, Throughput, measure

log = logging.getLogger(__name__)

VERSION_FAILURES_MAX = 4
"""With one version, in a row; then the node waits for the next one, and costs its owner nothing meanwhile."""

ENGINE_FAILURES_MAX = 2 * VERSION_FAILURES_MAX
"""In a row, whatever the version; a machine that fails so often needs its owner."""

OUTBOX_MAX = 256
"""Unsent rollouts before no more work is taken: the coordinator has been away for long."""

LOAD_AGAIN_S = 30.0
"""After a version that could not be loaded, unless another comes before: the fault may be the version's."""

FULL_DISK_PAUSE_S = 5.0

FIRST_GROUPS, FIRST_SAMPLES, FIRST_TOKENS_MAX = 8, 8, 32
"""What is sampled to know this machine's speed before the first lease; after that, the leases themselves tell it."""

CRASH_PAUSES_S = (0.0, 2.0, 10.0, 30.0)
"""After the first, second … failure of the engine in a row: a card that overheats or a driver that restarts needs a
moment."""

DECLINED_PAUSE_S = 30.0
"""After leases that could not be begun: the next ones will be no better at once."""

LAST_WORD_S = 1.0
"""For an answer that is on its way when the agent leaves, and for what it gives back."""


class VersionUnusable(EngineFailed):
    """A version with which the engine failed again and again; the node waits for the next one."""

    code = "version_unusable"


class Worker:
    """Turns leases into signed rollouts."""

    def __init__(
        self,
        *,
        coordinator: Coordinator,
        policies: PolicyFollower,
        engine: EngineClient,
        outbox: Outbox,
        leased: Leased,
        sender: Sender,
        teller: ProgressReporter,
        gate: Gate,
        key: NodeKey,
        round_id: str,
        groups_per_request: int,
        price_floor: Callable[[], int] = lambda: 0,
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
        self._appetite = LeasePacing(groups_per_request)
        self._price_floor = price_floor
        self._loaded: HeldVersion | None = None
        self._open: dict[str, Lease] = {}
        """Leases in the engine."""
        self._offered = set[str]()
        """Those that came, and were neither begun nor given back yet."""
        self._storing = ""
        """The lease whose answer is on its way to the disk: it is given up only if that fails."""
        self._numerics = ""
        self._continues = False
        """Whether the engine can go on where another stopped."""
        self._plays = False
        """Whether it can play environments."""
        self._failures = 0
        self._suspect: HeldVersion | None = None
        """The version with which the engine failed the last time."""
        self._suspect_failures = 0
        self.trouble = Trouble()
        self._samples_done = self._tokens_done = 0
        self._stays = False  # is there more to measure of the version in the engine?
        self.idle_for = ""
        """Why there is no work, by the coordinator's word or by what it offers; empty if there is some."""
        self.phase = Phase.OFFLINE
        self.tokens_per_s = 0.0
        self.finished = trio.Event()
        """Set when the coordinator says that the round has ended."""

    @property
    def version(self) -> int:
        """The version in the engine; 0 before the first."""
        return self._loaded.manifest.version if self._loaded else 0

    @property
    def engine_name(self) -> str:
        """Which engine samples; empty before the first version."""
        return self._engine.name if self._loaded else ""

    @property
    def open_leases(self) -> int:
        """Groups in the engine."""
        return len(self._open)

    async def run(self) -> None:
        """Work until the round is finished."""
        try:
            while not self.finished.is_set():
                try:
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
                except Unreachable:  # the heartbeat tells the owner
                    self._appetite.pause(1.0)
                except OwnerBanned:
                    raise
                except SwarmError as error:
                    self.trouble.met(error, "no work")
                    self._appetite.pause(1.0)
        finally:
            await self._give_back([*self._open, *sorted(self._offered)])

    def _is_hungry(self) -> bool:
        """Whether to ask for work: nothing is left, or there is room for more of the same version."""
        if not self._open:
            return True
        return (
            self._gate.decision.may_work
            and len(self._outbox) < OUTBOX_MAX
            and self._appetite.is_due(len(self._open))
            and self._next_now() == self._loaded
        )

    def _next_now(self) -> HeldVersion | None:
        """What to sample with next, if that is known: the newest version, or the loaded one while it is measured."""
        newest = self._policies.usable_now()
        return self._loaded if newest is not None and self._stays else newest

    async def _take_work(self) -> None:
        """Lease groups and put them into the engine, beside those that it still samples from the same version."""
        if not self._open:
            if not self._gate.decision.may_work:
                return await self._rest()
            self.phase = Phase.IDLE if self._loaded else Phase.OFFLINE
            await first_of(partial(trio.sleep, self._appetite.pause_s), self._gate.closed)
        policy = self._next_now() or await first_of(self._policies.usable, self._gate.closed)  # see `_is_hungry`
        if policy is None:
            return None
        if self._is_unusable(policy) and not self._open:
            self._loaded = None
            await self._engine.rest()
            await self._wait_for_newer(policy, math.inf)
        elif policy != self._loaded and not self._open:
            try:
                await self._load(policy)
            except EngineFailed as error:
                self._loaded = None
                self._count_failure(error, policy)
                await self._wait_for_newer(policy, LOAD_AGAIN_S)
        elif len(self._outbox) >= OUTBOX_MAX:
            self._appetite.pause(1.0)
        elif policy == self._loaded and (leases := await self._lease(policy)):
            self.phase = Phase.GENERATING
            self._open |= {lease.lease_id: lease for lease in leases}
            for lease in leases:
                self._teller.start(lease)
            sampler = policy.manifest.sampler
            await self._engine.submit(
                [SampleRequest.from_lease(lease, sampler, tell_every_s=TELL_S) for lease in leases]
            )
        return None

    async def _rest(self) -> None:
        """Do nothing while the gate is closed; a node that finishes has finished when nothing is open."""
        if self._gate.finishing:
            self.finished.set()
            return
        self.phase = Phase.RESTING
        if not self._gate.decision.keep_engine:
            self._loaded = None
            await self._engine.rest()
        await self._gate.opened()

    async def let_go(self) -> None:
        """Give back what is being sampled; called while `run` goes on."""
        await self._give_up(but=self._storing)

    async def _wait_for_newer(self, policy: HeldVersion, patience_s: float) -> None:
        """Until there is another version, or for so long, or until the gate closes."""
        await first_of(partial(self._policies.newer_than, policy, patience_s=patience_s), self._gate.closed)

    async def _collect(self) -> None:
        """Await the next group; sign and store it."""
        group = await self._engine.finished()
        lease = self._open.get(group.request_id) if group else None
        if group is None or lease is None:
            return  # it was given up
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
        self._failures = self._suspect_failures = 0
        self.trouble.over()
        self._samples_done += len(group.samples)
        self._tokens_done += sum(len(sample.tokens) // 4 for sample in group.samples)

    def _close(self, lease: Lease) -> None:
        """The engine has nothing more to do for a lease."""
        self._open.pop(lease.lease_id, None)  # it may have been dropped meanwhile
        self._teller.forget(lease.lease_id)

    async def drop(self, lease_ids: Collection[str]) -> None:
        """Stop sampling what the coordinator needs no more; called while `run` awaits the engine."""
        gone = self._open.keys() & set(lease_ids)
        for lease_id in gone:
            self._close(self._open[lease_id])
        with suppress(EngineFailed):  # `run` finds out by itself
            await self._engine.cancel(gone)

    def _count_failure(self, error: SwarmError, policy: HeldVersion | None) -> None:
        """Go on after a failure of the engine with this version, but not for ever."""
        log.error("engine failed times=%d: %s", self._failures + 1, error)
        if policy is not None and self._is_unusable(policy):
            return  # the others of its groups
        self._failures += 1
        if policy is not None and not isinstance(error, EngineNotStarted):  # of which no version is the reason
            self._suspect_failures = self._suspect_failures + 1 if policy == self._suspect else 1
            self._suspect = policy
            error = self._unusable(policy, error) if self._is_unusable(policy) else error
        self.trouble.show(error)
        if self._failures >= ENGINE_FAILURES_MAX:
            raise EngineFailed(
                f"The engine failed {self._failures} times in a row; the last time: {error.message}",
                hint=f"{error.hint} Run `swarm-node doctor` to test every engine.".strip(),
            ) from error
        self._appetite.pause(CRASH_PAUSES_S[min(self._failures, len(CRASH_PAUSES_S)) - 1])

    def _is_unusable(self, policy: HeldVersion) -> bool:
        return policy == self._suspect and self._suspect_failures >= VERSION_FAILURES_MAX

    def _unusable(self, policy: HeldVersion, error: SwarmError) -> VersionUnusable:
        return VersionUnusable(
            f"Version {policy.manifest.version} cannot be used: the engine failed {self._suspect_failures} times with "
            f"it. The last time: {error.message} The node waits for the next version.",
            hint="Run `swarm-node doctor` to test every engine; if they work, report this to the operator.",
        )

    async def _load(self, policy: HeldVersion) -> None:
        if not self._policies.hold_versions(policy, self._loaded):
            return  # it was too old by the time that it could be loaded
        if self._loaded:
            measured = Throughput.of(await self._engine.measured())
            self.tokens_per_s = measured.tokens_per_s or self.tokens_per_s
        self._loaded = None
        plays = policy.manifest.task in environments.names()
        loaded = await self._engine.load(policy.folder, policy.manifest.version, plays=plays)
        self._loaded, self._numerics, self._continues = policy, loaded.numerics, loaded.continues
        self._plays = loaded.plays
        self._policies.hold_versions(policy)
        self._policies.milestones.passed(policy.manifest.version, "loaded")
        update = policy.manifest.update
        log.info("version loaded version=%d update=%d seconds=%.2f", self.version, update, loaded.seconds)
        if not self.tokens_per_s:
            sampler = policy.manifest.sampler
            work = SampleWork(
                policy.manifest.task,
                groups=FIRST_GROUPS,
                samples=FIRST_SAMPLES,
                max_new_tokens=min(sampler.max_new_tokens, FIRST_TOKENS_MAX),
                temperature=sampler.temperature,
            )
            requests = await work.requests(self._engine, policy.manifest.version)
            self.tokens_per_s = (await measure(self._engine, requests, at_once=FIRST_GROUPS)).tokens_per_s
            log.info("throughput measured tokens_per_s=%.0f", self.tokens_per_s)

    async def _lease(self, policy: HeldVersion) -> tuple[Lease, ...]:
        request = LeaseRequest(
            version=policy.manifest.version,
            groups=self._appetite.room(len(self._open)),
            continues=self._continues,
            numerics=self._numerics,
            environments=environments.names() if self._plays else (),
        )
        reply = await heard_out(partial(self._ask, request), patience_s=LAST_WORD_S)
        self._appetite.record_request()
        self._policies.hint(reply.newest_version)
        self._stays = reply.stays
        new = self._offered
        if not len(new) == len(reply.leases) <= request.groups or any(
            lease.version != request.version for lease in reply.leases
        ):
            await self._give_back(sorted(new))
            raise LeaseClosed("The coordinator offers leases that this node did not ask for, or one of them twice.")
        if reply.reason == "finished":
            self.finished.set()
        elif not reply.leases:
            self._say_why(reply.reason)
            patience_s = min(max(reply.retry_s, 0.05), 30.0)
            if self._open:
                self._appetite.refused(patience_s)
            else:
                await self._wait_for_newer(policy, patience_s)
        begun = await self._begin(reply.leases)
        self._offered.clear()
        return begun

    async def _ask(self, request: LeaseRequest) -> LeaseReply:
        reply = await self._coordinator.lease(request)
        self._offered = {lease.lease_id for lease in reply.leases} - self._open.keys()
        return reply

    async def _begin(self, offered: Sequence[Lease]) -> tuple[Lease, ...]:
        """Those of the leases that this node begins; the others go back at once."""
        if not offered:
            return ()
        if self._gate.decision.at_once:
            await self._give_back([lease.lease_id for lease in offered])
            return ()
        pace = NodePace(self.tokens_per_s, self._tokens_done / max(1, self._samples_done))
        found = sort_out(offered, now_ms=self._coordinator.now_ms(), pace=pace, price_floor=self._price_floor())
        if found.declined:
            if not self.idle_for:
                log.warning("leases declined count=%d: %s", len(found.declined), found.why)
            await self._give_back(list(found.declined))
            self._appetite.pause(DECLINED_PAUSE_S)
        self.idle_for = "" if found.begun else found.why
        if found.begun:
            try:
                await trio.to_thread.run_sync(self._leased.keep, found.begun)
            except (DiskFull, LeaseClosed):
                await self._give_back([lease.lease_id for lease in found.begun])
                raise
        return found.begun

    def _say_why(self, reason: Reason) -> None:
        """Tell the owner why there is no work, when that becomes so."""
        if reason in NO_WORK and self.idle_for != NO_WORK[reason]:
            log.warning("no work: %s", NO_WORK[reason])
            self.idle_for = NO_WORK[reason]

    async def _give_up(self, *, but: str = "") -> None:
        """Leave everything that is being sampled to others."""
        self._stays = False  # the files of an older version may be gone
        lost = [lease_id for lease_id in self._open if lease_id != but]
        for lease_id in lost:
            self._close(self._open[lease_id])
        with suppress(EngineFailed):  # a new child knows nothing of them anyway
            await self._engine.cancel(lost)
        await self._give_back(lost)

    def _sign(self, lease: Lease, group: GroupDone) -> bytes:
        claim = RolloutClaim(
            round_id=self._round_id, lease_id=lease.lease_id, lease_digest=lease.digest, samples=group.samples
        )
        return self._key.seal("rollout", claim.to_bytes())

    async def _give_back(self, lease_ids: list[str]) -> None:
        """Best effort, even while being cancelled: an unreturned lease only expires later."""
        if not lease_ids:
            return
        self._offered.difference_update(lease_ids)
        with trio.CancelScope(shield=True, deadline=trio.current_time() + LAST_WORD_S):
            try:
                await self._coordinator.give_back(ReturnLeases(lease_ids=tuple(lease_ids)))
            except SwarmError as error:
                log.info("cannot return %d leases; they will expire (%s)", len(lease_ids), error.code)
