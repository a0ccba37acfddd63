"""The outbox: finished rollouts, signed and stored on the disk until the coordinator has judged them.

- One file per lease, named after it; a lease answered twice is the same file.
- `put` returns when the bytes are synced: after that neither a crash nor a network failure loses the work.
- Rollouts left unsent by a crash are sent at the next start; the coordinator recognises duplicates.
- The writer signs each group that ends, and stores it before the next group is awaited. Sending is the `sender`'s task,
  which is woken. While the outbox is full, no more work is requested.
- The lengths of the samples are averaged: they show how long further work will take.
"""

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import trio

from protocol.ids import LeaseId
from protocol.wire.signing import NodeKey
from protocol.work.lease import Lease
from protocol.work.rollout import RolloutClaim
from swarm_node.base.disk import disk_named, write_durably
from swarm_node.engine.messages import GroupDone
from swarm_node.work.sender import Sender

_SUFFIX = ".rollout"


class Outbox:
    """Signed rollouts that wait for a verdict."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with disk_named(folder):
            (folder / "incoming").mkdir(parents=True, exist_ok=True)
        for leftover in (folder / "incoming").iterdir():
            leftover.unlink(missing_ok=True)

    def put(self, lease_id: LeaseId, envelope: bytes) -> None:
        write_durably(self._folder / f"{lease_id}{_SUFFIX}", envelope, temp_folder=self._folder / "incoming")

    def waiting(self, count: int, max_bytes: int, *, but: Collection[LeaseId] = frozenset()) -> dict[LeaseId, bytes]:
        """Return the oldest unsent rollouts without `but`: at least one, then as many as fit into both limits.

        Files with the same time stamp are sorted by name, so that the order is stable. A file that is removed
        meanwhile, as after the verdict of another request, is skipped.
        """
        taken: dict[LeaseId, bytes] = {}
        with disk_named(self._folder):
            unsent = list[tuple[int, Path]]()
            for path in self._folder.glob(f"*{_SUFFIX}"):
                with suppress(FileNotFoundError):
                    if path.stem not in but:
                        unsent.append((path.stat().st_mtime_ns, path))
            for _, path in sorted(unsent)[:count]:
                with suppress(FileNotFoundError):
                    envelope = path.read_bytes()
                    if taken and sum(map(len, taken.values())) + len(envelope) > max_bytes:
                        break
                    taken[LeaseId(path.stem)] = envelope
        return taken

    def remove(self, lease_id: LeaseId) -> None:
        """Delete a rollout that was judged."""
        with disk_named(self._folder):
            (self._folder / f"{lease_id}{_SUFFIX}").unlink(missing_ok=True)

    def __len__(self) -> int:
        return sum(1 for _ in self._folder.glob(f"*{_SUFFIX}"))


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
