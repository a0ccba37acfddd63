"""Expected and arrived chunks of a node, so that a chunk is served as soon as it arrives.

- A download records the chunks that it expects (`expecting`) and that arrived (`arrived`); the chunk server listens.
- The state is in memory, on one event loop; the verified file in the store is authoritative.
- The bytes of the last chunks are kept: waiting requesters and the new files are served without reading the disk.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

from protocol import limits
from protocol.ids import ChunkId

FRESH_BYTES = 16 * limits.MIB

Listener = Callable[[], None]


class Arrivals:
    """Expected and arrived chunks of one node."""

    def __init__(self, fresh_bytes_max: int = FRESH_BYTES) -> None:
        self._fresh_bytes_max = fresh_bytes_max
        self._expected: set[ChunkId] = set()
        self._held: dict[ChunkId, int] = {}
        """Held chunks in order of arrival, with their sequence number, which stays the same across downloads."""
        self._came: list[ChunkId] = []
        """The held chunks as a list."""
        self._number = 0
        """Sequence number of the last arrival."""
        self._fresh: dict[ChunkId, bytes] = {}
        self._fresh_bytes = 0
        self._listeners: set[Listener] = set()
        self.downloads = 0
        """Number of downloads begun."""

    @property
    def expecting_any(self) -> bool:
        return bool(self._expected)

    @property
    def held_chunks(self) -> Collection[ChunkId]:
        """Chunks of the version that arrived last, or is arriving."""
        return self._held.keys()

    def came_after(self, known: int) -> list[ChunkId]:
        """Return held chunks in order of arrival, without the first `known`."""
        return self._came[known:]

    def news_after(self, number: int, at_most: int) -> tuple[list[ChunkId], int]:
        """Return up to `at_most` chunks after sequence number `number`, and the number of the last; a chunk is news
        once, also across downloads, unless it was lost and arrives again."""
        place = bisect_right(self._came, number, key=self._held.__getitem__)
        news = self._came[place : place + at_most]
        return news, self._held[news[-1]] if news else number

    def expects(self, chunk: ChunkId) -> bool:
        return chunk in self._expected

    @contextmanager
    def expecting(self, missing: Iterable[ChunkId], held: Iterable[ChunkId]) -> Iterator[None]:
        """Record the missing and the held chunks of a download, for the duration of the block."""
        held = dict.fromkeys(held)
        self._expected = set(missing)
        self._held = {chunk: number for chunk, number in self._held.items() if chunk in held}
        self._came = list(self._held)
        for chunk in held:
            self._hold(chunk)
        self.downloads += 1
        self._notify()
        try:
            yield
        finally:
            self._expected.clear()
            self._fresh.clear()
            self._fresh_bytes = 0
            self._notify()

    def arrived(self, chunk: ChunkId, data: bytes) -> None:
        """Record that a chunk is verified and stored."""
        self._expected.discard(chunk)
        self._hold(chunk)
        self._fresh[chunk] = data
        self._fresh_bytes += len(data)
        while self._fresh_bytes > self._fresh_bytes_max:
            self._fresh_bytes -= len(self._fresh.pop(next(iter(self._fresh))))
        self._notify()

    def _hold(self, chunk: ChunkId) -> None:
        if chunk not in self._held:
            self._number += 1
            self._held[chunk] = self._number
            self._came.append(chunk)

    def fresh(self, chunk: ChunkId) -> bytes | None:
        """Return the bytes of a recently arrived, verified chunk, or None; thread-safe."""
        return self._fresh.get(chunk)

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Call the listener after every change."""
        self._listeners.add(listener)
        try:
            yield
        finally:
            self._listeners.discard(listener)

    def _notify(self) -> None:
        for listener in list(self._listeners):
            listener()
