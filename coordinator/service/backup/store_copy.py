"""A SQLite store in a standby copy: one base, and the logs of everything written after it.

    000002.db           the store at the start of generation 2
    000002-000001.wal   the first log since then, complete
    000002-000002.wal   the current log, up to the point that was read

- Bytes are only appended. The copy's list (`backup.json`), which is replaced in one step, has the valid size of each
  file: bytes beyond it, left by a crash, are overwritten.
- A restarted follower continues if the store's log still begins with the copied bytes. Otherwise, and when the logs are
  larger than the base, a new generation begins beside the old one.
- `assemble` builds a store from them: SQLite's own recovery reads one log after the other.
"""

import os
import re
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from blake3 import blake3

from coordinator.base.files import make_folder, sync
from coordinator.service.backup import wal
from coordinator.service.backup.archive import BackupInvalid, Entry, described

FOLDER = "store"

TURN_BYTES = 16 * 2**20
"""Size of a log at which it may restart; without a follower SQLite restarts it at the same size."""

HELD_MAX_BYTES = 256 * 2**20
"""Size above which a log is discarded if the target fails, so that the round's own disk does not fill."""

BASE_AGAIN_BYTES = 64 * 2**20
"""Minimum size of all logs before the whole store is copied again."""

_BASE = re.compile(r"store/(\d{6})\.db")
_LOG = re.compile(r"store/(\d{6})-(\d{6})\.wal")


@dataclass
class _CopiedLog:
    """A log of the present generation, up to the point that was read."""

    name: str
    header: wal.WalHeader
    end: int = 0
    """Number of bytes in the copy."""
    hasher: Any = field(default_factory=blake3)
    unwritten: list[bytes] = field(default_factory=list)

    @property
    def read_to(self) -> int:
        return self.end + sum(map(len, self.unwritten))

    def entry(self) -> Entry:
        return Entry(name=self.name, size_bytes=self.end, digest=self.hasher.hexdigest())


class StoreCopy:
    """A copier that reads a store's log and appends it to a copy."""

    def __init__(self, store: Path, target: Path, known: Mapping[str, Entry], *, turn_bytes: int = TURN_BYTES) -> None:
        """`known` has the entries of the existing copy, by name."""
        self._store = store
        self._wal = store.with_name(f"{store.name}-wal")
        self._target = target
        self._known = known
        self._hold: wal.Hold | None = None
        self._entries: dict[str, Entry] = {}
        self._checksum: wal.Checksum = (0, 0)
        self._current: _CopiedLog | None = None
        self._complete: list[_CopiedLog] = []
        self._turn_bytes = self._turn_at = turn_bytes

    def pull(self, tell: Callable[[str, int, int], None]) -> None:
        """Read everything committed so far; the copy does not change, unless a generation begins."""
        if self._hold is None:
            self._hold = wal.Hold(self._store)
            if not self._resume():
                self._begin_generation(tell)
        self._read()
        if self._current and self._current.read_to > self._turn_at:
            turned = self._hold.turn(self._read)
            self._turn_at = self._turn_bytes + (0 if turned else self._current.read_to)

    def push(self) -> list[Entry]:
        """Append the bytes read to the copy and sync them; return the entries of the copy's store."""
        for copied in [*self._complete, *([self._current] if self._current else [])]:
            self._append(copied)
            self._entries[copied.name] = copied.entry()
        self._complete.clear()
        return list(self._entries.values())

    @property
    def needs_base(self) -> bool:
        """Return True if the logs are larger than the base: the next pass should copy the whole store."""
        sizes = {name: entry.size_bytes for name, entry in self._entries.items()}
        base = sum(size for name, size in sizes.items() if name.endswith(".db"))
        return sum(sizes.values()) - base > max(base, BASE_AGAIN_BYTES)

    def renew(self) -> None:
        """Make the next pass begin a new generation."""
        self.close()
        self._known = self._entries
        self._entries, self._current = {}, None

    def relieve(self) -> bool:
        """Discard the store's log if it has grown too large while the copy fails; return True if so."""
        if self._hold is None or not self._wal.exists() or self._wal.stat().st_size < HELD_MAX_BYTES:
            return False
        self.renew()
        return True

    def close(self) -> None:
        """Release the store."""
        if self._hold:
            self._hold.close()
        self._hold = None
        self._complete.clear()

    def _resume(self) -> bool:
        """Continue after the copied bytes; return False if the store's log does not begin with them."""
        if self._entries or not self._known:
            return False
        names = sorted(name for name in self._known if name.startswith(f"{FOLDER}/"))
        logs = [name for name in names if _LOG.fullmatch(name)]
        header = wal.read_header(self._wal)
        if not logs or header is None:
            return False
        last = self._known[logs[-1]]
        copied = self._target / last.name
        end = last.size_bytes
        if not copied.is_file() or copied.stat().st_size < end or end > self._wal.stat().st_size:
            return False
        if wal.read_header(copied) != header:
            return False
        if wal.frame_head(copied, header, end) != wal.frame_head(self._wal, header, end):
            return False
        self._entries = {name: self._known[name] for name in names}
        self._current = _CopiedLog(last.name, header, end)
        with copied.open("rb") as file:
            while end:
                data = file.read(min(end, wal.READ_AT_ONCE_BYTES))
                self._current.hasher.update(data)
                end -= len(data)
        self._checksum = wal.checksum_at(copied, header, last.size_bytes)
        return self._current.entry() == last

    def _begin_generation(self, tell: Callable[[str, int, int], None]) -> None:
        assert self._hold
        numbers = [int(match[1]) for name in self._known if (match := _BASE.fullmatch(name))]
        name = f"{FOLDER}/{max(numbers, default=0) + 1:06}.db"
        target = self._target / name
        make_folder(target.parent)
        for left in target.parent.glob(f"{target.stem}*"):  # after a crash
            left.unlink()
        self._hold.copy_to(target, tell)
        self._entries, self._current = {name: described(self._target, name)}, None
        sync(target.parent)

    def _read(self) -> None:
        """Read the log's new bytes; a log that has restarted is a new file, and the previous one is complete."""
        header = wal.read_header(self._wal)
        if header is None:
            return
        current = self._current
        if current is None or current.header != header:
            if current is not None:
                if header.number != (current.header.number + 1) % 2**32:
                    raise BackupInvalid(
                        "The store's log restarted before it was read completely.",
                        hint="The next pass copies the whole store.",
                    )
                self._complete.append(current)
            self._current = current = self._next_log(header)
            self._checksum = header.checksum
            current.unwritten.append(header.data)
        for piece in wal.committed(self._wal, header, current.read_to, self._checksum):
            current.unwritten.append(piece)
            first, second = piece[-header.frame_bytes :][16:20], piece[-header.frame_bytes :][20:24]
            self._checksum = int.from_bytes(first), int.from_bytes(second)

    def _next_log(self, header: wal.WalHeader) -> _CopiedLog:
        names = [*self._entries, *(copied.name for copied in self._complete)]
        (generation,) = {match[1] for name in names if (match := _BASE.fullmatch(name))}
        number = sum(1 for name in {*names} if _LOG.fullmatch(name))
        return _CopiedLog(f"{FOLDER}/{generation}-{number + 1:06}.wal", header)

    def _append(self, copied: _CopiedLog) -> None:
        """Append the unwritten bytes to a log of the copy; they count once the copy's list has the new size."""
        if not copied.unwritten:
            return
        path = self._target / copied.name
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        with os.fdopen(handle, "r+b") as file:
            file.truncate(copied.end)
            file.seek(copied.end)
            for piece in copied.unwritten:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        sync(path.parent)
        while copied.unwritten:
            piece = copied.unwritten.pop(0)
            copied.hasher.update(piece)
            copied.end += len(piece)


def is_copied(names: Iterable[str]) -> bool:
    """Return True if the files of a backup include a store as a base and logs."""
    return any(_BASE.fullmatch(name) for name in names)


def assemble(folder: Path, target: Path) -> None:
    """Build a store from the files of one generation."""
    bases, logs = sorted(folder.glob("*.db")), sorted(folder.glob("*.wal"))
    if len(bases) != 1:
        raise BackupInvalid(f"The copy has {len(bases)} bases of its store instead of 1.", hint="Use another copy.")
    bases[0].rename(target)
    numbers = [header.number for path in logs if (header := wal.read_header(path))]
    if len(numbers) < len(logs) or any(after != (before + 1) % 2**32 for before, after in pairwise(numbers)):
        raise BackupInvalid("A log of the copy's store is missing or damaged.", hint="Use another copy.")
    beside = target.with_name(f"{target.name}-wal")
    for path in logs:
        header = wal.read_header(path)
        assert header
        frames = (path.stat().st_size - wal.HEADER_BYTES) // header.frame_bytes
        if not frames:
            continue
        path.rename(beside)
        with closing(sqlite3.connect(target, isolation_level=None)) as store:
            if store.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                raise BackupInvalid(f"The base {bases[0].name} is not a store with a log.", hint="Use another copy.")
            moved = store.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        if moved != (0, frames, frames):
            raise BackupInvalid(f"{path.name} contains {moved[1]} of its {frames} pages.", hint="Use another copy.")
        beside.unlink(missing_ok=True)
