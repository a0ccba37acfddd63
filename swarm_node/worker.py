"""The worker: lease, generate, sign, store; then again, with the newest policy.

    OFFLINE ──policy ready──▶ IDLE ──leases──▶ LEASED ──▶ GENERATING ──group by group──▶ (outbox) ──▶ IDLE

- A lease is answered with the policy it names: versions change between batches, never inside one.
- A finished group is signed and on the disk before the next is awaited; sending is the `sender`'s task.
- Whatever ends a batch early (engine crash, full disk, Ctrl-C) gives the unanswered leases back.
"""

import logging
from contextlib import aclosing
from enum import StrEnum

import trio

from protocol.errors import DiskFull, EngineFailed, LeaseClosed, SwarmError, Unreachable
from protocol.ids import LeaseId
from protocol.lease import Lease
from protocol.messages import LeaseRequest, Reason, ReturnLeases
from protocol.rollout import RolloutClaim
from protocol.signing import NodeKey
from swarm_node.api_client import Coordinator
from swarm_node.engine.client import EngineClient
from swarm_node.engine.messages import GroupDone, Request
from swarm_node.outbox import Outbox
from swarm_node.policies import Policy, PolicyFollower
from swarm_node.sender import Sender

log = logging.getLogger(__name__)

ENGINE_FAILURES_MAX = 5
"""In a row; a machine that fails so often needs its owner."""

OUTBOX_MAX = 256
"""Unsent rollouts before no more work is taken: the coordinator has been away for long."""

FULL_DISK_PAUSE_S = 5.0

NO_WORK: dict[Reason, str] = {
    "standby": "others do it for less; this node stands by with the newest version, and is called when it is needed",
    "budget": "the round's budget is used up, or that of this hour",
}
"""What the owner should know; the other reasons pass by themselves."""


class Phase(StrEnum):
    """What a member is doing; a worker never mirrors, and a mirror does nothing else."""

    OFFLINE = "offline"
    IDLE = "idle"
    LEASED = "leased"
    GENERATING = "generating"
    MIRRORING = "mirroring"


class Worker:
    """Turns leases into signed rollouts."""

    def __init__(
        self,
        *,
        coordinator: Coordinator,
        policies: PolicyFollower,
        engine: EngineClient,
        outbox: Outbox,
        sender: Sender,
        key: NodeKey,
        round_id: str,
        groups_per_request: int,
    ) -> None:
        self._coordinator = coordinator
        self._policies = policies
        self._engine = engine
        self._outbox = outbox
        self._sender = sender
        self._key = key
        self._round_id = round_id
        self._groups_per_request = groups_per_request
        self._loaded: Policy | None = None
        self._failures = 0
        self._trouble = ""
        self._idle_for: Reason = ""
        self.phase = Phase.OFFLINE
        self.tokens_per_s = 0.0
        self.finished = trio.Event()
        """Set when the coordinator says that the round has ended."""

    @property
    def version(self) -> int:
        """The version in the engine; 0 before the first."""
        return self._loaded.manifest.version if self._loaded else 0

    async def run(self) -> None:
        """Work until the round is finished."""
        while not self.finished.is_set():
            policy = await self._policies.usable()
            try:
                if policy != self._loaded:
                    await self._load(policy)
                self.phase = Phase.IDLE
                if len(self._outbox) >= OUTBOX_MAX:
                    await trio.sleep(1.0)
                elif leases := await self._lease(policy):
                    await self._answer(policy, leases)
                self._failures, self._trouble = 0, ""
            except EngineFailed as error:
                self._failures += 1
                log.error("engine failed times=%d: %s", self._failures, error)
                if self._failures >= ENGINE_FAILURES_MAX:
                    raise
            except DiskFull as error:
                self._say_once(error, "work stopped")
                await trio.sleep(FULL_DISK_PAUSE_S)
            except Unreachable:  # the heartbeat tells the owner
                await trio.sleep(1.0)
            except SwarmError as error:
                self._say_once(error, "no work")
                await trio.sleep(1.0)

    def _say_once(self, error: SwarmError, what: str) -> None:
        """Tell the owner of a trouble when it begins, not each time it is met again."""
        if error.code != self._trouble:
            log.warning("%s code=%s: %s", what, error.code, error)
        self._trouble = error.code

    async def _load(self, policy: Policy) -> None:
        loaded = await self._engine.load(policy.folder)
        self._loaded = policy
        self._policies.milestones.passed(policy.manifest.version, "loaded")
        log.info(
            "version loaded version=%d update=%d seconds=%.2f",
            policy.manifest.version,
            policy.manifest.update,
            loaded.seconds,
        )
        if not self.tokens_per_s:
            self.tokens_per_s = await self._engine.measure_throughput()
            log.info("throughput measured tokens_per_s=%.0f", self.tokens_per_s)

    async def _lease(self, policy: Policy) -> tuple[Lease, ...]:
        request = LeaseRequest(version=policy.manifest.version, groups=self._groups_per_request)
        reply = await self._coordinator.lease(request)
        self._policies.hint(reply.newest_version)
        if reply.reason == "finished":
            self.finished.set()
        elif not reply.leases:
            self._say_why(reply.reason)
            await self._policies.newer_than(policy, patience_s=min(max(reply.retry_s, 0.05), 30.0))
        if reply.leases:
            self._idle_for = ""
        return reply.leases

    def _say_why(self, reason: Reason) -> None:
        """Tell the owner why there is no work, when that becomes so."""
        if reason != self._idle_for and reason in NO_WORK:
            log.warning("no work: %s", NO_WORK[reason])
            self._idle_for = reason

    async def _answer(self, policy: Policy, leases: tuple[Lease, ...]) -> None:
        """Generate all leases of a batch; those left over are given back."""
        self.phase = Phase.LEASED
        open_leases = {lease.lease_id: lease for lease in leases}
        try:
            if any(lease.version != policy.manifest.version for lease in leases):
                raise LeaseClosed("The coordinator offers leases for a version that this node did not ask for.")
            requests = [_request(lease, policy) for lease in leases]
            self.phase = Phase.GENERATING
            async with aclosing(self._engine.generate(requests)) as groups:
                async for group in groups:
                    self._policies.milestones.passed(
                        policy.manifest.version, "first_token", ago_s=group.first_token_ago_s
                    )
                    lease = open_leases[group.request_id]
                    await trio.to_thread.run_sync(self._outbox.put, LeaseId(lease.lease_id), self._sign(lease, group))
                    del open_leases[group.request_id]
                    self._sender.wake()
        finally:
            if open_leases:
                await self._give_back(list(open_leases))

    def _sign(self, lease: Lease, group: GroupDone) -> bytes:
        claim = RolloutClaim(
            round_id=self._round_id,
            lease_id=lease.lease_id,
            version=lease.version,
            seed=lease.seed,
            samples=group.samples,
        )
        return self._key.seal("rollout", claim.to_bytes())

    async def _give_back(self, lease_ids: list[str]) -> None:
        """Best effort, even while being cancelled: an unreturned lease only expires later."""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
            try:
                await self._coordinator.give_back(ReturnLeases(lease_ids=tuple(lease_ids)))
            except SwarmError as error:
                log.info("could not give %d leases back; they will expire (%s)", len(lease_ids), error.code)


def _request(lease: Lease, policy: Policy) -> Request:
    return Request(
        request_id=lease.lease_id,
        prompt=lease.prompt,
        seed=lease.seed,
        samples=lease.samples,
        max_new_tokens=policy.manifest.sampler.max_new_tokens,
        temperature=policy.manifest.sampler.temperature,
    )
