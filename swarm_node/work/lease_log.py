"""What was leased: the digest of every lease as it came, so that another one that is told later is known for a lie.

- A claim signs this digest too; here it stands for leases that were never answered, and against a second telling.
- The first note of a lease is the one that counts: one that is offered again with other terms is not begun.
- A line each, noted before anything is sampled. Lines begin with a newline: what a crash cut short spoils none after.
- Bounded: a file that is full becomes the old one, in the place of the one before; so the last `FILE_MAX_BYTES` stay.
- Nothing is synced, since nothing but a check depends on it: a lease that a power cut took is one without a note.
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
"""Signs of a lease that somebody must type at least; status shows eight."""

_LINE = re.compile("^([0-9a-f]{32}) ([0-9a-f]{64})$", re.MULTILINE)


class Leased:
    """The leases of one round."""

    def __init__(self, folder: Path) -> None:
        self._path, self._old = folder / FILE, folder / f"{FILE}.old"

    def keep(self, leases: Iterable[Lease]) -> None:
        """Note leases; twice is harmless, and raises where one says other things than it did the first time."""
        notes, lines = self._notes(), ""
        for lease in leases:
            digest = lease.digest
            if notes.get(lease.lease_id, digest) != digest:
                raise LeaseClosed(f"The coordinator offered lease {lease.lease_id} again with different content.")
            if lease.lease_id not in notes:
                lines += f"\n{lease.lease_id} {digest}"
        with disk_named(self._path.parent):
            if self._path.exists() and self._path.stat().st_size + len(lines) > FILE_MAX_BYTES:
                self._path.replace(self._old)
            with self._path.open("a") as file:
                file.write(lines)

    def digest_of(self, lease_id: str) -> Digest | None:
        """The digest of a lease as it came first; None without a note."""
        digest = self._notes().get(lease_id)
        return Digest(digest) if digest else None

    def typed(self, text: str) -> str:
        """The lease or claim that somebody names; of a lease that is noted here its beginning is enough."""
        if not re.fullmatch(f"[0-9a-f]{{{TYPED_MIN},64}}", text):
            raise ConfigInvalid(
                f"'{text}' is not the id of a lease or a claim.", hint="Run `swarm-node why JOIN_STRING` to list them."
            )
        if len(text) in (LEASE_CHARS, CLAIM_CHARS):
            return text
        found = [lease_id for lease_id in self._notes() if lease_id.startswith(text)]
        if len(found) != 1:
            many = f"{len(found)} leases in this folder start" if found else "No lease in this folder starts"
            raise ConfigInvalid(
                f"{many} with {text}.", hint="Give the full id; run `swarm-node why JOIN_STRING` to list them."
            )
        return found[0]

    def _notes(self) -> dict[str, str]:
        """The digest of each lease that is noted, the first one of several."""
        texts = [path.read_text(errors="replace") for path in (self._old, self._path) if path.exists()]
        lines = [line for text in texts for line in _LINE.findall(text)]
        return dict(reversed(lines))
