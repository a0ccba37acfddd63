"""A SQLite store in a standby copy: one base, and the logs of all that was written after it.

    000002.db           the store as it was when generation 2 began
    000002-000001.wal   the first log since, whole
    000002-000002.wal   the log that is being written, as far as it was read

- Bytes are only appended. How many of them count is said by the list of the copy (`backup.json`), which is replaced in
  one step: what a crash left behind the end is overwritten.
- A follower that was started again goes on where it was if the store's log still begins with what was copied. Else, and
  when the logs have become larger than the base, a new generation begins beside the old one.
- `assemble` makes a store of them: SQLite's own recovery reads one log after the other.
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
"""Of a log, before it may begin anew; without a follower SQLite does so at the same size."""

HELD_MAX_BYTES = 256 * 2**20
"""Of a log that cannot be copied, because the target fails: beyond it the round's own disk is worth more."""

BASE_AGAIN_BYTES = 64 * 2**20
"""Of logs, at least, before the store is copied as a whole again."""

_BASE = re.compile(r"store/(\d{6})\.db")
_LOG = re.compile(r"store/(\d{6})-(\d{6})\.wal")


@dataclass
class _CopiedLog:
    """A log of the present generation, as far as it is in the copy or was read."""

    name: str
    header: wal.WalHeader
    end: int = 0
    """Bytes in the copy."""
    hasher: Any = field(default_factory=blake3)
    unwritten: list[bytes] = field(default_factory=list)

    @property
    def read_to(self) -> int:
        return self.end + sum(map(len, self.unwritten))

    def entry(self) -> Entry:
        return Entry(name=self.name, size_bytes=self.end, digest=self.hasher.hexdigest())


class StoreCopy:
    """Reads a store's log and appends it to a copy."""

    def __init__(self, store: Path, target: Path, known: Mapping[str, Entry], *, turn_bytes: int = TURN_BYTES) -> None:
        """`known` is what the copy has already, by names."""
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
        """Read everything that was committed by now; the copy is not touched, unless a generation begins."""
        if self._hold is None:
            self._hold = wal.Hold(self._store)
            if not self._resume():
                self._begin_generation(tell)
        self._read()
        if self._current and self._current.read_to > self._turn_at:
            turned = self._hold.turn(self._read)
            self._turn_at = self._turn_bytes + (0 if turned else self._current.read_to)

    def push(self) -> list[Entry]:
        """Append what was read to the copy, synced; what the copy's store consists of now."""
        for one in [*self._complete, *([self._current] if self._current else [])]:
            self._append(one)
            self._entries[one.name] = one.entry()
        self._complete.clear()
        return list(self._entries.values())

    @property
    def needs_base(self) -> bool:
        """Whether the logs have outgrown the base: the next pass copies the store as a whole."""
        sizes = {name: entry.size_bytes for name, entry in self._entries.items()}
        base = sum(size for name, size in sizes.items() if name.endswith(".db"))
        return sum(sizes.values()) - base > max(base, BASE_AGAIN_BYTES)

    def renew(self) -> None:
        """Begin a generation with the next pass."""
        self.close()
        self._known = self._entries
        self._entries, self._current = {}, None

    def relieve(self) -> bool:
        """Let the store's log go where it has become too large to be kept for a copy that fails; True if it was."""
        if self._hold is None or not self._wal.exists() or self._wal.stat().st_size < HELD_MAX_BYTES:
            return False
        self.renew()
        return True

    def close(self) -> None:
        """Let go of the store."""
        if self._hold:
            self._hold.close()
        self._hold = None
        self._complete.clear()

    def _resume(self) -> bool:
        """Go on after what is in the copy; False if the store's log does not begin with it."""
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
        numbers = [int(found[1]) for name in self._known if (found := _BASE.fullmatch(name))]
        name = f"{FOLDER}/{max(numbers, default=0) + 1:06}.db"
        target = self._target / name
        make_folder(target.parent)
        for left in target.parent.glob(f"{target.stem}*"):  # by a crash
            left.unlink()
        self._hold.copy_to(target, tell)
        self._entries, self._current = {name: described(self._target, name)}, None
        sync(target.parent)

    def _read(self) -> None:
        """What the log has got since; a log that began anew is another file, and the one before it is complete."""
        header = wal.read_header(self._wal)
        if header is None:
            return
        current = self._current
        if current is None or current.header != header:
            if current is not None:
                if header.number != (current.header.number + 1) % 2**32:
                    raise BackupInvalid("The store's log began anew unseen.", hint="The next pass copies the store.")
                self._complete.append(current)
            self._current = current = self._next_log(header)
            self._checksum = header.checksum
            current.unwritten.append(header.data)
        for piece in wal.committed(self._wal, header, current.read_to, self._checksum):
            current.unwritten.append(piece)
            first, second = piece[-header.frame_bytes :][16:20], piece[-header.frame_bytes :][20:24]
            self._checksum = int.from_bytes(first), int.from_bytes(second)

    def _next_log(self, header: wal.WalHeader) -> _CopiedLog:
        names = [*self._entries, *(one.name for one in self._complete)]
        (generation,) = {found[1] for name in names if (found := _BASE.fullmatch(name))}
        number = sum(1 for name in {*names} if _LOG.fullmatch(name))
        return _CopiedLog(f"{FOLDER}/{generation}-{number + 1:06}.wal", header)

    def _append(self, one: _CopiedLog) -> None:
        """Write behind what counts; it counts when the copy's list says so."""
        if not one.unwritten:
            return
        path = self._target / one.name
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        with os.fdopen(handle, "r+b") as file:
            file.truncate(one.end)
            file.seek(one.end)
            for piece in one.unwritten:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        sync(path.parent)
        while one.unwritten:
            piece = one.unwritten.pop(0)
            one.hasher.update(piece)
            one.end += len(piece)


def is_copied(names: Iterable[str]) -> bool:
    """Return True if the store of a backup consists of a base and logs."""
    return any(_BASE.fullmatch(name) for name in names)


def assemble(folder: Path, target: Path) -> None:
    """Make a store of the files of one generation."""
    bases, logs = sorted(folder.glob("*.db")), sorted(folder.glob("*.wal"))
    if len(bases) != 1:
        raise BackupInvalid(f"The copy has {len(bases)} bases of its store.", hint="Use another one.")
    bases[0].rename(target)
    numbers = [header.number for path in logs if (header := wal.read_header(path))]
    if len(numbers) < len(logs) or any(after != (before + 1) % 2**32 for before, after in pairwise(numbers)):
        raise BackupInvalid("A log of the copy's store is missing or damaged.", hint="Use another one.")
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
                raise BackupInvalid(f"The base {bases[0].name} is no store with a log.", hint="Use another one.")
            found = store.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        if found != (0, frames, frames):
            raise BackupInvalid(f"{path.name} holds {found[1]} of its {frames} pages.", hint="Use another one.")
        beside.unlink(missing_ok=True)
