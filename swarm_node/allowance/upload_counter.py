"""Counter of a node's uploads in this month, kept over restarts, so that a limit holds.

- Bytes are counted in advance: a portion is saved as used before its first byte is sent. A killed node has counted too
  much, by at most one portion, never too little; a node that ends normally counts exactly.
- A month is a calendar month in UTC; a new one begins at zero.
- A file that cannot be read counts as a used-up month, so that the limit always holds.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import trio

from protocol import limits
from swarm_node.base.disk import write_durably

FILE = "uploads.json"
"""File in a node's home: all rounds share one network connection."""

PORTION_BYTES = 16 * limits.MIB
"""Small compared with any useful limit; the file is written once per few chunks."""


class UploadCounter:
    """Upload counter of one home."""

    def __init__(self, home: Path, now: Callable[[], datetime]) -> None:
        self._path, self._now = home / FILE, now
        self._month, self._ahead_bytes = self._read()
        self.bytes = self._ahead_bytes
        """Bytes uploaded this month."""
        self.cap_bytes: int | None = None
        self._writing = trio.Lock()

    async def count(self, size_bytes: int) -> bool:
        """Count bytes about to be sent; return False if the limit does not allow them."""
        self._turn()
        if self.cap_bytes is not None and self.bytes + size_bytes > self.cap_bytes:
            return False
        self.bytes += size_bytes
        while self.bytes > self._ahead_bytes:
            async with self._writing:
                if self.bytes > self._ahead_bytes:
                    await trio.to_thread.run_sync(self._write, self.bytes + PORTION_BYTES)
        return True

    @property
    def used_up(self) -> bool:
        """True if no more bytes may be sent this month."""
        self._turn()
        return self.cap_bytes is not None and self.bytes >= self.cap_bytes - limits.CHUNK_MAX_BYTES

    def this_month(self) -> int:
        """Return the bytes uploaded in the current month."""
        self._turn()
        return self.bytes

    def close(self) -> None:
        """Save the exact count."""
        if self._ahead_bytes != self.bytes:
            self._write(self.bytes)

    def _turn(self) -> None:
        month = f"{self._now():%Y-%m}"
        if month != self._month:
            self._month, self.bytes, self._ahead_bytes = month, 0, 0

    def _read(self) -> tuple[str, int]:
        month = f"{self._now():%Y-%m}"
        if not self._path.exists():
            return month, 0
        with suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads(self._path.read_bytes())
            return str(kept["month"]), max(0, int(kept["bytes"]))
        return month, limits.TRANSFER_MAX_BYTES

    def _write(self, ahead_bytes: int) -> None:
        said = json.dumps({"month": self._month, "bytes": ahead_bytes}).encode()
        write_durably(self._path, said, temp_folder=self._path.parent)
        self._ahead_bytes = ahead_bytes
