"""What a node is about to hold, and news of what it has just got: how a chunk travels on the moment it arrives.

- A download says what it expects (`expecting`) and what came (`arrived`); the server of other nodes listens.
- Lives in memory, on one event loop; what counts as held is still the verified file in the store.
- The bytes that came last are kept: who waits for them is served, and the new files are filled, without the disk.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

from protocol import limits
from protocol.ids import ChunkId

FRESH_BYTES = 16 * limits.MIB

Listener = Callable[[], None]


class Arrivals:
    """One node's expectations and news."""

    def __init__(self, fresh_bytes_max: int = FRESH_BYTES) -> None:
        self._fresh_bytes_max = fresh_bytes_max
        self._expected: set[ChunkId] = set()
        self._held: dict[ChunkId, int] = {}
        """In the order in which they came, and the number of each: it keeps that from download to download."""
        self._came: list[ChunkId] = []
        """The same names."""
        self._number = 0
        """Of what came last."""
        self._fresh: dict[ChunkId, bytes] = {}
        self._fresh_bytes = 0
        self._listeners: set[Listener] = set()
        self.downloads = 0
        """How many were begun."""

    @property
    def expecting_any(self) -> bool:
        return bool(self._expected)

    @property
    def held_chunks(self) -> Collection[ChunkId]:
        """Chunks of the version that came last, or is on its way."""
        return self._held.keys()

    def came_after(self, known: int) -> list[ChunkId]:
        """Held chunks in the order of their arrival, without so many of the first."""
        return self._came[known:]

    def news_after(self, number: int, at_most: int) -> tuple[list[ChunkId], int]:
        """So many of those that came after the one of this number, and the number of the last; whatever download began
        meanwhile, what came once is no news until it was lost and comes again."""
        place = bisect_right(self._came, number, key=self._held.__getitem__)
        news = self._came[place : place + at_most]
        return news, self._held[news[-1]] if news else number

    def expects(self, chunk: ChunkId) -> bool:
        return chunk in self._expected

    @contextmanager
    def expecting(self, missing: Iterable[ChunkId], held: Iterable[ChunkId]) -> Iterator[None]:
        """For the time of a download: what is still to come, and what is here already."""
        held = dict.fromkeys(held)
        self._expected = set(missing)
        self._held = {chunk: number for chunk, number in self._held.items() if chunk in held}
        self._came = list(self._held)
        for chunk in held:
            self._hold(chunk)
        self.downloads += 1
        self._tell()
        try:
            yield
        finally:
            self._expected.clear()
            self._fresh.clear()
            self._fresh_bytes = 0
            self._tell()

    def arrived(self, chunk: ChunkId, data: bytes) -> None:
        """A chunk is verified and stored."""
        self._expected.discard(chunk)
        self._hold(chunk)
        self._fresh[chunk] = data
        self._fresh_bytes += len(data)
        while self._fresh_bytes > self._fresh_bytes_max:
            self._fresh_bytes -= len(self._fresh.pop(next(iter(self._fresh))))
        self._tell()

    def _hold(self, chunk: ChunkId) -> None:
        if chunk not in self._held:
            self._number += 1
            self._held[chunk] = self._number
            self._came.append(chunk)

    def fresh(self, chunk: ChunkId) -> bytes | None:
        """A verified chunk's bytes, if it came a moment ago; any thread may ask."""
        return self._fresh.get(chunk)

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Call the listener after every change."""
        self._listeners.add(listener)
        try:
            yield
        finally:
            self._listeners.discard(listener)

    def _tell(self) -> None:
        for listener in list(self._listeners):
            listener()
