"""Writer of rollouts: signs each group that ends, and stores it in the outbox before the next group is awaited.

- Sending is the `sender`'s task, which is woken. While the outbox is full, no more work is requested.
- The lengths of the samples are averaged: they show how long further work will take.
"""

import trio

from protocol.ids import LeaseId
from protocol.wire.signing import NodeKey
from protocol.work.lease import Lease
from protocol.work.rollout import RolloutClaim
from swarm_node.engine.messages import GroupDone
from swarm_node.work.outbox import Outbox
from swarm_node.work.sender import Sender

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
