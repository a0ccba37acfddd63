"""The outbox: finished rollouts, stored on the disk until the coordinator has judged them.

- One file per lease, named after it; a lease answered twice is the same file.
- `put` returns when the bytes are synced: after that neither a crash nor a network failure loses the work.
- Rollouts left unsent by a crash are sent at the next start; the coordinator recognises duplicates.
"""

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from protocol.ids import LeaseId
from swarm_node.base.disk import disk_named, write_durably

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
