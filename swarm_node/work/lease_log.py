"""Log of the digest of every lease as first received, so that a different lease under the same id is detected.

- A claim also signs this digest; this log covers leases that were never answered, and changed leases.
- The first entry of a lease counts: a lease that is offered again with other terms is not begun.
- One line per lease, written before anything is sampled. Lines begin with a newline, so that a line cut short by a
  crash does not damage later lines.
- Bounded: a full file becomes the old file and replaces the previous old file; so the last `FILE_MAX_BYTES` stay.
- The files are read once, and what they say is then kept in memory: a lease waits for its entry before it is begun.
- Nothing is synced, since only a check depends on it: a lease lost in a power cut has no entry.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from protocol import limits
from protocol.errors import ConfigInvalid, LeaseClosed
from protocol.ids import Digest
from protocol.work.lease import Lease
from swarm_node.base.disk import disk_named

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
