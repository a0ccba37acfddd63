"""Reading the write-ahead log of a SQLite store while other processes write to it.

    header   32 bytes: magic, format, page size, sequence number, two salts, checksum
    frame    24 bytes (page, pages after a commit, two salts, checksum), then the page

- Only whole transactions are read: up to the last frame that commits, with every checksum before it verified. Reading
  ends at a frame that is being written or was left by an earlier log.
- While the reader of a `Hold` is open, SQLite neither deletes nor restarts the log, so nothing is missed between two
  reads. The log grows meanwhile; `Hold.turn` lets it restart at a moment when no other process can write.
- A page's checksum is a sum of its words with constant weights (mod 2^32), which numpy computes in microseconds.
- SQLite's own recovery reads the copy: it stops at the first incomplete frame.
"""

import errno
import os
import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HEADER_BYTES, FRAME_BYTES = 32, 24
MAGIC, BIG_ENDIAN = 0x377F0682, 1

READ_AT_ONCE_BYTES = 2**24
"""Bytes of the log in memory at once."""

TRANSACTION_MAX_BYTES = 2**30
"""Larger transactions are not read; an upgrade may have one, but the coordinator is stopped during it."""

PAGES_AT_ONCE = 2048
"""Pages of a full copy between two progress reports."""

BUSY_S = 1.0
"""Longest wait for a lock: the coordinator's transactions are short, and a pass must not wait long."""

Checksum = tuple[int, int]


@dataclass(frozen=True)
class WalHeader:
    """The header of a log; a different header means that the log has restarted."""

    data: bytes
    page_bytes: int

    @property
    def number(self) -> int:
        """Return the first salt, which grows by 1 at each restart; each connection has its own sequence number."""
        return int.from_bytes(self.data[16:20])

    @property
    def frame_bytes(self) -> int:
        return FRAME_BYTES + self.page_bytes

    @property
    def salts(self) -> bytes:
        return self.data[16:24]

    @property
    def checksum(self) -> Checksum:
        first, second = struct.unpack(">II", self.data[24:32])
        return first, second

    @property
    def words(self) -> str:
        """Return the type of the words in the checksum."""
        return ">u4" if self.data[3] & BIG_ENDIAN else "<u4"

    @classmethod
    def parse(cls, data: bytes) -> "WalHeader | None":
        """Return the header if `data` begins with a valid one; otherwise None."""
        if len(data) < HEADER_BYTES:
            return None
        magic, _, page_bytes = struct.unpack(">III", data[:12])
        header = cls(data[:HEADER_BYTES], page_bytes)
        if magic & ~BIG_ENDIAN != MAGIC or not 512 <= page_bytes <= 65536:
            return None
        return header if checksum((0, 0), data[:24], header.words) == header.checksum else None


def read_header(path: Path) -> WalHeader | None:
    """Return the header of a log file; None if there is no log."""
    try:
        with path.open("rb") as file:
            return WalHeader.parse(file.read(HEADER_BYTES))
    except FileNotFoundError:
        return None


def committed(path: Path, header: WalHeader, start: int, before: Checksum) -> Iterator[bytes]:
    """Yield the bytes of whole transactions from offset `start`, in pieces that each end with a commit.

    `before` is the checksum of everything before `start`. The header is compared again after each piece: bytes that a
    restarted log wrote meanwhile are not returned.
    """
    with path.open("rb") as file:
        position, running, at_once = start, before, READ_AT_ONCE_BYTES
        while True:
            file.seek(position)
            data = file.read(at_once)
            size_bytes, running = _whole_transactions(data, header, running)
            if not size_bytes and len(data) == at_once < TRANSACTION_MAX_BYTES:
                at_once *= 2
                continue
            file.seek(0)
            if not size_bytes or file.read(HEADER_BYTES) != header.data:
                return
            yield data[:size_bytes]
            position, at_once = position + size_bytes, READ_AT_ONCE_BYTES


def _whole_transactions(data: bytes, header: WalHeader, before: Checksum) -> tuple[int, Checksum]:
    """Return the length of the whole transactions at the start of `data`, and the checksum after them."""
    size_bytes, after, running, end = 0, before, before, 0
    while end + header.frame_bytes <= len(data):
        frame = data[end : end + header.frame_bytes]
        summed = _frame_checksum(running, frame, header)
        if summed is None:
            break
        end, running = end + header.frame_bytes, summed
        if frame[4:8] != bytes(4):
            size_bytes, after = end, running
    return size_bytes, after


def checksum_at(path: Path, header: WalHeader, end: int) -> Checksum:
    """Return the checksum of everything before offset `end`, from the frame before it."""
    if end == HEADER_BYTES:
        return header.checksum
    with path.open("rb") as file:
        file.seek(end - header.frame_bytes)
        first, second = struct.unpack(">II", file.read(FRAME_BYTES)[16:24])
    return first, second


def frame_head(path: Path, header: WalHeader, end: int) -> bytes:
    """Return the head of the frame that ends at offset `end`; its checksum depends on every byte before."""
    if end == HEADER_BYTES:
        return header.data
    with path.open("rb") as file:
        file.seek(end - header.frame_bytes)
        return file.read(FRAME_BYTES)


def checksum(before: Checksum, data: bytes, words: str) -> Checksum:
    """Return SQLite's checksum, continued from `before` over an even number of words."""
    values = np.frombuffer(data, words).astype(np.uint32)
    first, second = values[0::2], values[1::2]
    weights = _weights(len(first))
    with np.errstate(over="ignore"):
        both = first + second
        made = [
            int((weights[row, 0] * first).sum(dtype=np.uint32) + (weights[row, 1] * both).sum(dtype=np.uint32))
            for row in (0, 1)
        ]
    m00, m01, m10, m11 = _power(len(first))
    s0, s1 = before
    return (m00 * s0 + m01 * s1 + made[0]) % 2**32, (m10 * s0 + m11 * s1 + made[1]) % 2**32


@cache
def _power(steps: int) -> tuple[int, int, int, int]:
    """Return the matrix of `steps` steps: each turns (s0, s1) into (s0 + s1, s0 + 2·s1), and adds its two words."""
    m00, m01, m10, m11 = 1, 0, 0, 1
    for _ in range(steps):
        m00, m01, m10, m11 = (m00 + m10, m01 + m11, m00 + 2 * m10, m01 + 2 * m11)
    return m00 % 2**32, m01 % 2**32, m10 % 2**32, m11 % 2**32


@cache
def _weights(steps: int) -> NDArray[np.uint32]:
    """Return the final weights of the words of each step: a value added at a step passes through all later ones."""
    rows = np.empty((2, 2, steps), np.uint32)
    m00, m01, m10, m11 = 1, 0, 0, 1
    for step in range(steps - 1, -1, -1):
        rows[:, :, step] = [[m00, m01], [m10, m11]]
        m00, m01, m10, m11 = (
            (m00 + m10) % 2**32, (m01 + m11) % 2**32, (m00 + 2 * m10) % 2**32, (m01 + 2 * m11) % 2**32
        )  # fmt: skip
    return rows


def _frame_checksum(before: Checksum, frame: bytes, header: WalHeader) -> Checksum | None:
    """Return the running checksum after a frame; None if the frame does not belong to this log."""
    if frame[8:16] != header.salts:
        return None
    running = checksum(checksum(before, frame[:8], header.words), frame[FRAME_BYTES:], header.words)
    return running if struct.pack(">II", *running) == frame[16:24] else None


class Hold:
    """A reader that prevents a restart of a store's log until it is closed."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._reader = self._open()
        self._begin()

    def _open(self) -> sqlite3.Connection:
        uri = f"{self._store.absolute().as_uri()}?mode=rw"
        return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_S, check_same_thread=False)

    def _begin(self) -> None:
        self._reader.execute("BEGIN")
        self._reader.execute("SELECT count(*) FROM sqlite_master").fetchone()

    def copy_to(self, target: Path, tell: Callable[[str, int, int], None]) -> None:
        """Copy the store as this reader sees it to `target`."""

        def step(_status: int, remaining: int, total: int) -> None:
            tell("store", total - remaining, total)

        try:
            with closing(sqlite3.connect(target)) as copied:
                self._reader.backup(copied, pages=PAGES_AT_ONCE, progress=step)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                raise
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error

    def turn(self, read_rest: Callable[[], Any]) -> bool:
        """Let the log restart with the next transaction; return True if it will, False if others are writing.

        1. Block other writers. 2. `read_rest` reads the rest of the log, which is now final.
        3. SQLite moves the pages into the store. 4. The reader begins again. 5. Other writers may continue.
        """
        with closing(self._open()) as writer, closing(self._open()) as mover:
            try:
                writer.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                    raise
                return False
            read_rest()
            self._reader.execute("ROLLBACK")
            try:
                _, pages, moved = mover.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            finally:
                self._begin()
            writer.execute("ROLLBACK")
        return bool(pages == moved)

    def close(self) -> None:
        self._reader.close()
