"""Refusals: this node's own record of what was rejected, and why, for `swarm-node why`.

- A file for each lease: the evidence, and the rollout as it was signed, so that the check can be repeated here.
- It is kept before the outbox forgets the rollout. The same lease again overwrites it, whatever was said first.
- The last `KEPT_MAX` are kept, and of these no more than `KEPT_MAX_BYTES`, but always the newest.
- What a crash or a stranger has damaged is passed over: nothing but words depends on it.
"""

from collections.abc import Iterator
from pathlib import Path

from protocol import limits
from protocol.errors import SwarmError
from protocol.wire.message import Message
from protocol.work.evidence import RejectionEvidence
from swarm_node.base.disk import disk_named, write_durably

KEPT_MAX = limits.EXPLANATIONS_MAX
KEPT_MAX_BYTES = 64 * limits.MIB
"""A claim of the greatest size four times; most have kilobytes."""

FOLDER = "refusals"
_SUFFIX = ".refusal"


class Refusal(Message):
    """One rejection."""

    lease_id: str
    evidence: RejectionEvidence
    rollout: bytes
    """The envelope as it was sent."""


class Refusals:
    """The last rejections of one round."""

    def __init__(self, folder: Path, kept_bytes_max: int = KEPT_MAX_BYTES) -> None:
        self._folder = folder
        self._kept_bytes_max = kept_bytes_max

    def keep(self, lease_id: str, envelope: bytes, evidence: RejectionEvidence) -> None:
        """Note one; the same again is not written twice."""
        before = self.find(lease_id)
        if before is not None and before.evidence == evidence:
            return
        with disk_named(self._folder.parent):
            (self._folder / "incoming").mkdir(parents=True, exist_ok=True)
        data = Refusal(lease_id=lease_id, evidence=evidence, rollout=envelope).to_bytes()
        write_durably(self._folder / f"{lease_id}{_SUFFIX}", data, temp_folder=self._folder / "incoming")
        self._forget_old()

    def forget(self, lease_id: str) -> None:
        """It was taken after all."""
        (self._folder / f"{lease_id}{_SUFFIX}").unlink(missing_ok=True)

    def find(self, lease_id: str) -> Refusal | None:
        """That of one lease."""
        return next((refusal for refusal in self if refusal.lease_id == lease_id), None)

    def __iter__(self) -> Iterator[Refusal]:
        """The newest first."""
        for path in self._paths():
            try:
                yield Refusal.from_bytes(path.read_bytes(), max_bytes=2 * limits.REQUEST_MAX_BYTES)
            except (SwarmError, OSError):
                continue

    def _paths(self) -> list[Path]:
        return sorted(self._folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime_ns, reverse=True)

    def _forget_old(self) -> None:
        size_bytes = 0
        for number, path in enumerate(self._paths()):
            size_bytes += path.stat().st_size
            if number and (number >= KEPT_MAX or size_bytes > self._kept_bytes_max):
                path.unlink(missing_ok=True)
