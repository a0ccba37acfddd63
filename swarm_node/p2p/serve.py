"""Answer other nodes' WANTs from the chunk store.

- A chunk is verified each time it is read from the disk; what is neither here nor expected is rejected as absent.
- A WANT for a chunk that is on its way here waits, and is answered the moment the chunk arrives; one for a chunk that
  nobody expects waits `grace_s`, since the requester may have heard of a version a moment sooner.
- Requesters are told what arrives (HAVE), so that they can ask for it; little later, and so much at once.
- Nothing more is read from a requester that does not take its answers.
- What leaves is counted (`meter`) before it does; where the owner's volume is used up, the answer is busy.
- Bounded per peer (streams) and in total (streams, chunks in memory): beyond, the answer is busy.
- Every wait has a deadline: for a WANT to come, for a chunk to arrive, for a slot to get free, for the peer to take
  bytes.
"""

import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import islice

import trio

from protocol import limits
from protocol.errors import PeerFault, UnknownChunk
from protocol.exchange import Responder
from protocol.frames import Chunk, Farewell, Have, Reason, Reject, Want
from protocol.ids import ChunkId, NodeId
from swarm_node.arrivals import Arrivals
from swarm_node.blobs import BlobStore
from swarm_node.p2p.link import Link, PeerVanished


@dataclass(frozen=True)
class ServeLimits:
    """What serving others may cost this node."""

    streams_per_peer: int = 2
    streams: int = 256
    uploads: int = 32
    """Chunks in memory at once: 128 MiB at the largest chunk size."""
    slot_s: float = 5.0
    """Waiting for an upload slot; after that the peer is told to come back."""
    stall_s: float = 20.0
    wait_s: float = 30.0
    """Waiting for a chunk that is on its way here."""
    grace_s: float = 2.0
    """Waiting for a chunk that nobody here has heard of."""
    news_s: float = 0.5
    """Between two HAVEs: whoever was planned to ask here does so without being told."""
    idle_s: float = 120.0
    """Without a WANT the stream is closed, unless something is on its way; opening another costs two round trips."""


Meter = Callable[[int], Awaitable[bool]]
"""Counts bytes that are about to leave; False: they must not."""


async def _unmetered(_size_bytes: int) -> bool:
    return True


class ChunkServer:
    """Serves one chunk store; `handle` is given to `Host.serve`."""

    def __init__(
        self,
        blobs: BlobStore,
        arrivals: Arrivals | None = None,
        limits: ServeLimits | None = None,
        meter: Meter = _unmetered,
    ) -> None:
        self.meter = meter
        self.blobs = blobs
        self.arrivals = arrivals or Arrivals()
        self.limits = limits or ServeLimits()
        self.uploads = trio.CapacityLimiter(self.limits.uploads)
        self.bytes_sent = 0
        self._streams: Counter[NodeId] = Counter()

    async def handle(self, link: Link) -> None:
        """Serve one stream to its end."""
        if self._streams[link.peer] >= self.limits.streams_per_peer or self._streams.total() >= self.limits.streams:
            await link.close(Farewell.BUSY)
            return
        self._streams[link.peer] += 1
        try:
            await link.close(await _Conversation(self, link).run())
        except PeerVanished:
            await link.abort()
        except PeerFault:
            await link.close(Farewell.FAULT)
            raise
        finally:
            self._streams[link.peer] -= 1
            if not self._streams[link.peer]:
                del self._streams[link.peer]


class _Conversation:
    """One stream: a reader notes what is wanted, a writer answers what can be answered."""

    def __init__(self, server: ChunkServer, link: Link) -> None:
        self._server, self._link, self._limits = server, link, server.limits
        self._responder = Responder()
        self._replies: deque[Reject] = deque()
        self._ready: dict[ChunkId, None] = {}
        """Owed chunks that are here, in the order in which to answer."""
        self._waiting: dict[ChunkId, float] = {}
        """Owed chunks that are not here yet, and when to say so."""
        self._told = 0
        """How many of the chunks that arrived the requester knows of."""
        self._downloads_seen = 0
        self._tell_at = self._told_at = -math.inf
        """When to tell of what arrived (`inf`: nothing did), and when that was done last."""
        self._idle_at = trio.current_time() + self._limits.idle_s
        self._changed, self._sent = trio.Event(), trio.Event()
        self._farewell = Farewell.DONE
        self._failure: PeerFault | None = None

    async def run(self) -> Farewell:
        """Converse until the requester leaves or falls silent."""
        with self._server.arrivals.listening(self._look):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read, nursery.cancel_scope)
                nursery.start_soon(self._write, nursery.cancel_scope)
        if self._failure is not None:
            raise self._failure
        return self._farewell

    async def _read(self, conversation: trio.CancelScope) -> None:
        try:
            while not self._responder.ended:
                for message in await self._link.receive():
                    if rejected := self._responder.receive(message):
                        self._replies.append(rejected)
                        self._forget(rejected.chunk)
                    if isinstance(message, Want):
                        self._place(message.chunk)
                    self._changed.set()
                while len(self._replies) > limits.EXCHANGE_WANTS_MAX:  # it asks and takes back faster than it reads
                    self._sent = trio.Event()
                    await self._sent.wait()
        except PeerFault as error:
            self._failure = self._failure or error
        conversation.cancel()

    async def _write(self, conversation: trio.CancelScope) -> None:
        try:
            while await self._next_step():
                pass
        except PeerFault as error:
            self._failure = error  # even after the reader's: a peer that stalls a writer ends as a torn stream there
        conversation.cancel()

    def _place(self, chunk: ChunkId) -> None:
        """Decide about a new WANT: answer, or wait."""
        if self._server.blobs.has(chunk):
            self._ready[chunk] = None
        else:
            expected = self._server.arrivals.expects(chunk)
            self._waiting[chunk] = trio.current_time() + (self._limits.wait_s if expected else self._limits.grace_s)

    def _forget(self, chunk: ChunkId) -> None:
        """A WANT is answered, or was taken back."""
        self._ready.pop(chunk, None)
        self._waiting.pop(chunk, None)

    def _look(self) -> None:
        """Something arrived, or is expected now, or is not any more."""
        arrivals, now = self._server.arrivals, trio.current_time()
        matters = self._tell_at == math.inf  # else the writer wakes for the news by itself
        self._tell_at = min(self._tell_at, self._told_at + self._limits.news_s)
        for chunk in list(self._waiting):
            if chunk in arrivals.held:
                del self._waiting[chunk]
                self._ready[chunk] = None
                matters = True
            elif arrivals.expects(chunk):
                self._waiting[chunk] = max(self._waiting[chunk], now + self._limits.wait_s)
        if matters:
            self._changed.set()

    async def _next_step(self) -> bool:
        """Send one frame, or wait for something to send; False when the requester has been silent for too long."""
        if self._replies:
            await self._send(self._replies.popleft())
        elif news := self._news():
            await self._send(Have(news))
        elif self._ready:
            await self._answer(next(iter(self._ready)))
        else:
            return await self._wait()
        return True

    def _news(self) -> tuple[ChunkId, ...]:
        """What arrived here and the requester was not told of, when it is time."""
        arrivals, now = self._server.arrivals, trio.current_time()
        if now < self._tell_at:
            return ()
        if self._downloads_seen != arrivals.downloads:
            self._downloads_seen, self._told = arrivals.downloads, 0
        news = tuple(islice(arrivals.held, self._told, self._told + limits.EXCHANGE_HAVE_NAMES_MAX))
        self._told += len(news)
        if news:
            self._told_at = now
        else:
            self._tell_at = math.inf
        return news

    async def _wait(self) -> bool:
        self._changed = trio.Event()
        idle_at = math.inf if self._responder.owed or self._server.arrivals.expecting_any else self._idle_at
        with trio.move_on_at(min(idle_at, self._tell_at, *self._waiting.values())):
            await self._changed.wait()
        now = trio.current_time()
        for chunk, until in list(self._waiting.items()):
            if now >= until:
                self._reject(chunk, Reason.ABSENT)
        if now >= idle_at and not self._responder.owed:
            self._farewell = Farewell.IDLE
            return False
        return True

    async def _answer(self, chunk: ChunkId) -> None:
        """One CHUNK or REJECT, unless the WANT was taken back."""
        try:
            with trio.fail_after(self._limits.slot_s):
                await self._server.uploads.acquire()
        except trio.TooSlowError:
            self._reject(chunk, Reason.BUSY)
            return
        try:
            if chunk in self._responder.owed:
                self._responder.take(chunk)
                self._forget(chunk)
                data = self._server.arrivals.fresh(chunk)
                if data is None:
                    data = await trio.to_thread.run_sync(self._server.blobs.read, chunk)
                if not await self._server.meter(len(data)):
                    await self._send(self._responder.reject(chunk, Reason.BUSY))
                    return
                await self._send(self._responder.chunk(chunk, data))
                self._server.bytes_sent += len(data)
        except UnknownChunk:
            await self._send(self._responder.reject(chunk, Reason.ABSENT))
        finally:
            self._server.uploads.release()

    def _reject(self, chunk: ChunkId, reason: Reason) -> None:
        self._forget(chunk)
        if chunk in self._responder.owed:
            self._replies.append(self._responder.reject(chunk, reason))

    async def _send(self, message: Chunk | Reject | Have) -> None:
        await self._link.send(message, stall_s=self._limits.stall_s)
        self._sent.set()
        self._idle_at = trio.current_time() + self._limits.idle_s
