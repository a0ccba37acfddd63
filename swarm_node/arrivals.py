"""What a node is about to hold, and news of what it has just got: how a chunk travels on the moment it arrives.

- A download says what it expects (`expecting`) and what came (`arrived`); the server of other nodes listens.
- Lives in memory, on one event loop; what counts as held is still the verified file in the store.
- The bytes that came last are kept: who waits for them is served, and the new files are filled, without the disk.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

from protocol import limits
from protocol.ids import ChunkId

FRESH_BYTES = 16 * limits.MIB

Listener = Callable[[], None]


class Arrivals:
    """One node's expectations and news."""

    def __init__(self) -> None:
        self._expected: set[ChunkId] = set()
        self._held: set[ChunkId] = set()
        self._came: list[ChunkId] = []
        """The same in order."""
        self._fresh: dict[ChunkId, bytes] = {}
        self._fresh_bytes = 0
        self._listeners: set[Listener] = set()
        self.downloads = 0
        """How many were begun: with each, what is held is counted anew."""

    @property
    def expecting_any(self) -> bool:
        return bool(self._expected)

    @property
    def held(self) -> Collection[ChunkId]:
        """Chunks of the version that came last, or is on its way."""
        return self._held

    def came_after(self, known: int, at_most: int | None = None) -> list[ChunkId]:
        """Held chunks in the order of their arrival, without so many of the first."""
        return self._came[known : None if at_most is None else known + at_most]

    def expects(self, chunk: ChunkId) -> bool:
        return chunk in self._expected

    @contextmanager
    def expecting(self, missing: Iterable[ChunkId], held: Iterable[ChunkId]) -> Iterator[None]:
        """For the time of a download: what is still to come, and what is here already."""
        self._expected = set(missing)
        self._came = list(held)
        self._held = set(self._came)
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
        if chunk not in self._held:
            self._held.add(chunk)
            self._came.append(chunk)
        self._fresh[chunk] = data
        self._fresh_bytes += len(data)
        while self._fresh_bytes > FRESH_BYTES:
            self._fresh_bytes -= len(self._fresh.pop(next(iter(self._fresh))))
        self._tell()

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
