"""Records of a node for `swarm-node why`: the digest of every lease as first received, and each rejected rollout.

The log of leases detects a different lease under the same id.

- A claim also signs this digest; this log covers leases that were never answered, and changed leases.
- The first entry of a lease counts: a lease that is offered again with other terms is not begun.
- One line per lease, written before anything is sampled. Lines begin with a newline, so that a line cut short by a
  crash does not damage later lines.
- Bounded: a full file becomes the old file and replaces the previous old file; so the last `FILE_MAX_BYTES` stay.
- The files are read once, and what they say is then kept in memory: a lease waits for its entry before it is begun.
- Nothing is synced, since only a check depends on it: a lease lost in a power cut has no entry.

A rejected rollout is kept with the reasons.

- One file per lease: the evidence, and the signed rollout, so that the check can be repeated locally.
- The file is written before the outbox deletes the rollout. A later rejection of the same lease overwrites it.
- The last `KEPT_MAX` files are kept, up to `KEPT_MAX_BYTES`, but always the newest.
- Damaged files are skipped: only explanations depend on them.
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from protocol import limits
from protocol.errors import ConfigInvalid, LeaseClosed, SwarmError
from protocol.ids import Digest
from protocol.wire.message import Message
from protocol.work.evidence import RejectionEvidence
from protocol.work.lease import Lease
from swarm_node.base.disk import disk_named, write_durably

KEPT_MAX = limits.EXPLANATIONS_MAX
KEPT_MAX_BYTES = 64 * limits.MIB
"""Four claims of the largest size; most have kilobytes."""

REJECTIONS = "refusals"
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


FILE = "leased"

FILE_MAX_BYTES = 4 * limits.MIB
"""Forty thousand leases."""

LEASE_CHARS, CLAIM_CHARS = 32, 64

TYPED_MIN = 6
"""Smallest number of characters of a lease id that a user must type; status shows eight."""

_LINE = re.compile("^([0-9a-f]{32}) ([0-9a-f]{64})$", re.MULTILINE)


class LeaseLog:
    """Log of the leases of one round."""

    def __init__(self, folder: Path) -> None:
        self._path, self._old = folder / FILE, folder / f"{FILE}.old"
        self._known: dict[bytes, bytes] | None = None
        """Digest of each lease in the files; None before they are read. Bytes, since there may be eighty thousand."""

    def record(self, leases: Iterable[Lease]) -> None:
        """Record leases; a repetition is harmless. Raise an error if a lease differs from its first entry."""
        if self._known is None:
            self._known = {bytes.fromhex(name): bytes.fromhex(digest) for name, digest in self._entries().items()}
        known, new = self._known, dict[bytes, bytes]()
        for lease in leases:
            name, digest = bytes.fromhex(lease.lease_id), bytes.fromhex(lease.digest)
            if known.get(name, digest) != digest:
                raise LeaseClosed(f"The coordinator offered lease {lease.lease_id} again with different content.")
            if name not in known:
                new[name] = digest
        if new:
            self._append("".join(f"\n{name.hex()} {digest.hex()}" for name, digest in new.items()))
            if self._known is not None:
                self._known |= new

    def _append(self, lines: str) -> None:
        with disk_named(self._path.parent):
            if self._path.exists() and self._path.stat().st_size + len(lines) > FILE_MAX_BYTES:
                self._path.replace(self._old)
                self._known = None  # the file before it is gone: read again what is left
            with self._path.open("a") as file:
                file.write(lines)

    def digest_of(self, lease_id: str) -> Digest | None:
        """Return the digest of a lease as first received; None without an entry."""
        digest = self._entries().get(lease_id)
        return Digest(digest) if digest else None

    def typed(self, text: str) -> str:
        """Return the full id of a lease or claim that a user typed; the start of a recorded lease suffices."""
        if not re.fullmatch(f"[0-9a-f]{{{TYPED_MIN},64}}", text):
            raise ConfigInvalid(
                f"'{text}' is not the id of a lease or a claim.", hint="Run `swarm-node why` to list them."
            )
        if len(text) in (LEASE_CHARS, CLAIM_CHARS):
            return text
        matches = [lease_id for lease_id in self._entries() if lease_id.startswith(text)]
        if len(matches) != 1:
            many = f"{len(matches)} leases in this folder start" if matches else "No lease in this folder starts"
            raise ConfigInvalid(f"{many} with {text}.", hint="Give the full id; run `swarm-node why` to list them.")
        return matches[0]

    def _entries(self) -> dict[str, str]:
        """Return the digest of each recorded lease, the first one of several."""
        texts = [path.read_text(errors="replace") for path in (self._old, self._path) if path.exists()]
        lines = [line for text in texts for line in _LINE.findall(text)]
        return dict(reversed(lines))
