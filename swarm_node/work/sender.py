"""The sender: sends the rollouts in the outbox to the coordinator, and has the verdicts recorded; and their writer.

- The writer signs each group that ends, and stores it in the outbox before the next group is awaited. It wakes the
  sender. While the outbox is full, no more work is requested.
- The lengths of the samples are averaged: they show how long further work will take.
- A rollout leaves the outbox only after its verdict; after a lost answer it is sent again, which is harmless.
- One request at a time, so that the groups that end meanwhile share the next one. A turn of an episode is sent at once,
  beside the others, since the next turn depends on it. After a failure none is, until the next answer.
- All requests under way share the limits of one: with eight rollouts under way a turn waits. One rollout that is larger
  than the space left is still sent.
- The answer may have leases, for the next turns of episodes: the worker gets them before the verdicts are recorded. If
  that answer is lost, the one to the rollouts that are sent again has them, or the worker gets them by a request.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence

import trio

from protocol import limits
from protocol.errors import SwarmError, Unreachable
from protocol.ids import LeaseId
from protocol.wire.signing import NodeKey
from protocol.work.lease import Lease
from protocol.work.messages import Submission, SubmissionReply
from protocol.work.rollout import RolloutClaim
from swarm_node.coordinator_api.client import Coordinator
from swarm_node.engine.messages import GroupDone
from swarm_node.work.outbox import Outbox
from swarm_node.work.verdicts import VerdictRecorder

log = logging.getLogger(__name__)

ROLLOUTS_PER_REQUEST = 8
ROLLOUT_BYTES_PER_REQUEST = limits.MESSAGE_MAX_BYTES // 2
"""Leaves space for the message around them; a single larger rollout is still sent alone."""

BEGIN_S = 0.02
"""Longest wait of the worker for the sender, which may wait for the answer to its last request."""

AddTurns = Callable[[Sequence[Lease]], Awaitable[None]]
"""Starts or returns the leases of next turns."""


class Sender:
    """Sender of the outbox; call `wake` after adding a rollout."""

    def __init__(self, coordinator: Coordinator, outbox: Outbox, verdicts: VerdictRecorder) -> None:
        self._coordinator = coordinator
        self._outbox = outbox
        self._verdicts = verdicts
        self._woken = trio.Event()
        self._begun = trio.Event()
        """Set when the rollouts so far are about to be sent."""
        self._turn_stored = trio.Event()
        """Set when a turn is stored, and replaced then."""
        self._choosing = trio.Lock()
        self._sending: dict[LeaseId, int] = {}
        """Sizes of the rollouts in the requests under way, in bytes."""
        self._is_idle = False
        self._hurried = trio.Event()
        """Set to end the pause after a failure, and replaced then."""
        self._failures = 0
        """Requests that failed since the start."""
        self._request_ended = trio.Event()
        """Set when a request has succeeded or failed, and replaced then."""
        self._is_answered = True
        """False after a request without an answer, until the next one with an answer."""

    def wake(self, *, at_once: bool = False) -> None:
        """Send what is in the outbox; `at_once` also while another request is under way."""
        self._woken.set()
        if self._begun.is_set():
            self._begun = trio.Event()
        if at_once and not self._is_idle:
            self._turn_stored.set()
        self._is_idle = False

    async def begun(self) -> None:
        """Wait until the request with the rollouts in the outbox is about to be sent, for at most `BEGIN_S`.

        A request for more work before it would delay the verdict by a commit, and a caller may wait for that.
        """
        with trio.move_on_after(BEGIN_S):
            await self._begun.wait()

    async def flush(self) -> None:
        """Send the outbox without a pause; return when it is empty, or when a request has failed."""
        failures = self._failures
        self._hurried.set()
        self.wake()
        while len(self._outbox) and self._failures == failures:
            await self._request_ended.wait()

    async def run(self, add_turns: AddTurns) -> None:
        """Send rollouts until cancelled; call `add_turns` with leases in the coordinator's answers."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send_in_order, add_turns)
            while True:
                await self._turn_stored.wait()
                self._turn_stored = trio.Event()
                if self._is_answered:
                    nursery.start_soon(self._send_beside, add_turns)

    async def _send_in_order(self, add_turns: AddTurns) -> None:
        """Send one request after the other, after a failure with a pause."""
        failures = 0
        while True:
            self._woken = trio.Event()
            sent = await self._try_to_send(add_turns)
            if sent is None:
                with trio.move_on_after(limits.retry_pause_s(failures)):
                    await self._hurried.wait()
                self._hurried = trio.Event()
                failures += 1
                continue
            failures = 0
            if not sent:
                self._is_idle = not self._woken.is_set()
                await self._woken.wait()
                self._is_idle = False

    async def _send_beside(self, add_turns: AddTurns) -> None:
        """Send what is in no request yet; after a failure `_send_in_order` sends it again."""
        while await self._try_to_send(add_turns):
            pass
        self._woken.set()

    async def _try_to_send(self, add_turns: AddTurns) -> int | None:
        """Send one request; return the number of judged rollouts, or None after a failure."""
        sent = await self._try_request(add_turns)
        self._request_ended.set()
        self._request_ended = trio.Event()
        return sent

    async def _try_request(self, add_turns: AddTurns) -> int | None:
        try:
            sent = await self.send_some(add_turns)
        except SwarmError as error:
            level = logging.DEBUG if isinstance(error, Unreachable) else logging.WARNING
            log.log(level, "rollouts not sent yet code=%s: %s", error.code, error)
            self._is_answered = False
            self._failures += 1
            return None
        if sent:
            self._is_answered = True
        return sent

    async def send_some(self, add_turns: AddTurns) -> int:
        """Send the oldest rollouts that are in no request yet; return the number that were judged."""
        async with self._choosing:
            chosen = await trio.to_thread.run_sync(self._choose)
            self._sending |= {lease_id: len(envelope) for lease_id, envelope in chosen.items()}
        self._begun.set()
        if not chosen:
            return 0
        try:
            reply = await self._submit(chosen)
            if reply.leases:
                await add_turns(reply.leases)
            await self._verdicts.record(chosen, reply.verdicts)
        finally:
            for lease_id in chosen:
                del self._sending[lease_id]
        return len(chosen)

    def _choose(self) -> dict[LeaseId, bytes]:
        """Return the oldest rollouts that are in no request, as far as the limits of all requests allow."""
        room_bytes = ROLLOUT_BYTES_PER_REQUEST - sum(self._sending.values())
        count = ROLLOUTS_PER_REQUEST - len(self._sending) if room_bytes > 0 else 0
        return self._outbox.waiting(count, room_bytes, but=self._sending)

    async def _submit(self, chosen: dict[LeaseId, bytes]) -> SubmissionReply:
        """Submit rollouts; if the coordinator rejects the request, store the evidence and raise its error."""
        try:
            return await self._coordinator.submit(Submission(rollouts=tuple(chosen.values())))
        except SwarmError as error:
            await self._verdicts.record_rejected_request(chosen, error)
            raise


OUTBOX_MAX = 256
"""Unsent rollouts at which no more work is requested: the coordinator has been unreachable for long."""


class RolloutWriter:
    """Writer of one round's rollouts."""

    def __init__(self, key: NodeKey, round_id: str, outbox: Outbox, sender: Sender) -> None:
        self._key, self._round_id = key, round_id
        self._outbox, self._sender = outbox, sender
        self._samples = self._tokens = 0
        self.storing = ""
        """The lease whose rollout is being written to the disk; empty if none is."""

    @property
    def is_full(self) -> bool:
        """True if so many rollouts are unsent that no more work is requested."""
        return len(self._outbox) >= OUTBOX_MAX

    @property
    def tokens_per_sample(self) -> float:
        """Average length of a sample; 0 before the first group."""
        return self._tokens / max(1, self._samples)

    async def write(self, lease: Lease, group: GroupDone) -> None:
        """Sign and store the answer to a lease, and wake the sender."""
        self.storing = lease.lease_id
        try:
            await trio.to_thread.run_sync(self._outbox.put, LeaseId(lease.lease_id), self._sign(lease, group))
        finally:
            self.storing = ""
        self._sender.wake(at_once=bool(lease.turn_tokens_max))
        self._samples += len(group.samples)
        self._tokens += sum(len(sample.tokens) // 4 for sample in group.samples)

    def _sign(self, lease: Lease, group: GroupDone) -> bytes:
        claim = RolloutClaim(
            round_id=self._round_id, lease_id=lease.lease_id, lease_digest=lease.digest, samples=group.samples
        )
        return self._key.seal("rollout", claim.to_bytes())
