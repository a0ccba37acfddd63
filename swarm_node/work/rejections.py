"""Record of this node's rejected rollouts and the reasons, for `swarm-node why`.

- One file per lease: the evidence, and the signed rollout, so that the check can be repeated locally.
- The file is written before the outbox deletes the rollout. A later rejection of the same lease overwrites it.
- The last `KEPT_MAX` files are kept, up to `KEPT_MAX_BYTES`, but always the newest.
- Damaged files are skipped: only explanations depend on them.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from protocol import limits
from protocol.errors import SwarmError
from protocol.wire.message import Message
from protocol.work.evidence import RejectionEvidence
from swarm_node.base.disk import disk_named, write_durably

KEPT_MAX = limits.EXPLANATIONS_MAX
KEPT_MAX_BYTES = 64 * limits.MIB
"""Four claims of the largest size; most have kilobytes."""

FOLDER = "refusals"
_SUFFIX = ".refusal"


class Rejection(Message):
    """Rejection of one rollout."""

    lease_id: str
    evidence: RejectionEvidence
    rollout: bytes
    """The signed envelope, as sent."""


class Rejections:
    """Latest rejections of one round."""

    def __init__(self, folder: Path, kept_bytes_max: int = KEPT_MAX_BYTES) -> None:
        self._folder = folder
        self._kept_bytes_max = kept_bytes_max

    def record(self, lease_id: str, envelope: bytes, evidence: RejectionEvidence) -> None:
        """Store a rejection; a repetition is not written again."""
        before = self.find(lease_id)
        if before is not None and before.evidence == evidence:
            return
        with disk_named(self._folder.parent):
            (self._folder / "incoming").mkdir(parents=True, exist_ok=True)
        data = Rejection(lease_id=lease_id, evidence=evidence, rollout=envelope).to_bytes()
        write_durably(self._folder / f"{lease_id}{_SUFFIX}", data, temp_folder=self._folder / "incoming")
        self._forget_old()

    def forget(self, lease_id: str) -> None:
        """Delete the rejection of a rollout that was accepted later."""
        (self._folder / f"{lease_id}{_SUFFIX}").unlink(missing_ok=True)

    def find(self, lease_id: str) -> Rejection | None:
        """Return the rejection of a lease, if any."""
        return next((rejection for rejection in self if rejection.lease_id == lease_id), None)

    def __iter__(self) -> Iterator[Rejection]:
        """Iterate over the rejections, newest first."""
        for path, _ in self._files():
            try:
                yield Rejection.from_bytes(path.read_bytes(), max_bytes=2 * limits.REQUEST_MAX_BYTES)
            except (SwarmError, OSError):
                continue

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        """Return the files, newest first, without those that are deleted meanwhile."""
        files = list[tuple[Path, os.stat_result]]()
        for path in self._folder.glob(f"*{_SUFFIX}"):
            with suppress(FileNotFoundError):
                files.append((path, path.stat()))
        return sorted(files, key=lambda file: file[1].st_mtime_ns, reverse=True)

    def _forget_old(self) -> None:
        size_bytes = 0
        for number, (path, stat) in enumerate(self._files()):
            size_bytes += stat.st_size
            if number and (number >= KEPT_MAX or size_bytes > self._kept_bytes_max):
                path.unlink(missing_ok=True)
