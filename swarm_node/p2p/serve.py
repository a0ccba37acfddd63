"""Server of chunks: answers other nodes' WANTs from the chunk store.

- A chunk is verified each time it is read from the disk; a chunk that is neither stored nor expected is rejected as
  absent.
- A WANT for a chunk that is still arriving waits, and is answered as soon as the chunk arrives. After `wait_s` it is
  rejected as absent, so that the requester gets an answer in time and may ask again. A WANT for a chunk that is not
  expected waits `grace_s`, since the requester may have learned of a version slightly earlier; longer while the disk is
  still being asked for it.
- HAVE announces arriving chunks to requesters: soon, in batches, and each chunk once.
- Nothing more is read from a requester that does not read its answers.
- Bytes are counted (`meter`) before they are sent; when the owner's upload allowance is used up, the answer is BUSY.
- A chunk is sent when its stream has a turn (`turns`), one chunk per turn: some streams wait for requesters that are
  behind other nodes. Only a limited number of small frames go before the chunk of a turn.
- Limits per peer (streams) and in total (streams, turns, and so chunks in memory): beyond them, the answer is BUSY.
- When a WANT arrives and all turns are taken, the requester that has received nothing for the longest time is cut off,
  if that is longer than `turn_s` and none was cut off in the last `turn_s`. So a crowd cannot cut off all slow links.
- Every wait has a deadline: for a WANT, for a chunk to arrive, for a turn, for the peer to read bytes.
"""

import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import islice

import trio

from protocol import limits
from protocol.errors import DiskFull, PeerFault, UnknownChunk
from protocol.ids import ChunkId, NodeId
from protocol.wire.exchange import Responder
from protocol.wire.frames import Chunk, Farewell, Have, Reason, Reject, Want
from swarm_node.chunks.arrivals import Arrivals
from swarm_node.chunks.blobs import BlobStore
from swarm_node.p2p.link import Link, PeerStalled, PeerVanished
from swarm_node.p2p.turns import Turns


@dataclass(frozen=True)
class ServeLimits:
    """Limits on what serving others may cost this node."""

    streams_per_peer: int = 2
    streams: int = 512
    """Enough for all connections of a host: a connected peer is not kept out by the streams of others."""
    turns: int = 32
    """Chunks in memory at once, each twice: as read, and in its frame. 256 MiB at the largest chunk size."""
    turn_s: float = 5.0
    """Longest wait for a turn; after that, if all are taken, the answer is BUSY. A peer that accepts no slice (1
    MiB, or the rest of a chunk) in that time keeps its turn only while no other stream waits for one."""
    stall_s: float = 20.0
    wait_s: float = 30.0
    """Longest wait for a chunk that is still arriving; half of a requester's patience."""
    grace_s: float = 2.0
    """Longest wait for a chunk that this node does not expect."""
    news_s: float = 0.5
    """Pause between two HAVEs: nodes whose plan lists this node ask without a HAVE."""
    idle_s: float = 120.0
    """A stream without a WANT is closed after this, unless a chunk is arriving; reopening costs two round trips."""


SERVED_KEPT_MAX = 4096
"""Peers kept for `report_served`; only the seeder calls it, every second."""

Meter = Callable[[int], Awaitable[bool]]
"""Counts bytes about to be sent; False means that they must not be sent."""


async def _unmetered(_size_bytes: int) -> bool:
    return True


class ChunkServer:
    """Server of one chunk store; `handle` is passed to `Host.serve`."""

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
        self.bytes_sent = 0
        self._served: dict[NodeId, None] = {}
        """Peers that received chunks since the last report."""
        self._delivered = trio.Event()
        self.takers: dict[Link, trio.CancelScope] = {}
        """Links with a send under way."""
        self._cut_at = -math.inf
        self.turns = Turns[Link](self.limits.turns, self.limits.turn_s)
        self._wakes: dict[Link, Callable[[], None]] = {}
        self._streams: Counter[NodeId] = Counter()

    def record_delivery(self, peer: NodeId, size_bytes: int) -> None:
        """Record that a peer has received a chunk."""
        self.bytes_sent += size_bytes
        self._served[peer] = None
        self._delivered.set()
        if len(self._served) > SERVED_KEPT_MAX:
            del self._served[next(iter(self._served))]

    async def wait_served(self) -> None:
        """Wait until a peer has received a chunk and was not reported since."""
        while not self._served:
            self._delivered = trio.Event()
            await self._delivered.wait()

    def report_served(self, count: int) -> list[NodeId]:
        """Return up to `count` peers that received chunks and were not reported since."""
        reported = list(islice(self._served, count))
        for peer in reported:
            del self._served[peer]
        return reported

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

    async def has(self, chunk: ChunkId) -> bool:
        """Return True if a chunk is on the disk; the check runs in a thread."""
        try:
            return await trio.to_thread.run_sync(self.blobs.has, chunk, abandon_on_cancel=True)
        except DiskFull:
            return False

    def ask_for_turn(self, link: Link, *, is_behind: bool, wake: Callable[[], None]) -> None:
        """Queue a stream that has a chunk to send; `wake` is called when its turn comes."""
        if self.turns.full:
            self.hurry()
        self._wakes[link] = wake
        self.turns.wait(link, trio.current_time(), is_behind=is_behind, group=link.neighbourhood)

    def admit(self) -> None:
        """Wake the streams whose turn has come."""
        now = trio.current_time()
        for link in self.turns.admit(now):
            link.moved_at = now
            self._wakes[link]()

    def end_turn(self, link: Link) -> None:
        """End the turn, or the wait, of a stream."""
        self._wakes.pop(link, None)
        self.turns.leave(link)

    def hurry(self) -> None:
        """Cut off the slowest stream with a turn, if the limits allow it; called when all turns are taken."""
        holders = filter(self.turns.is_sending, self.takers)
        slowest = min(holders, key=lambda link: link.moved_at, default=None)
        now = trio.current_time()
        if slowest is not None and now - max(slowest.moved_at, self._cut_at) > self.limits.turn_s:
            self._cut_at = now
            self.takers[slowest].cancel()


class _Announcements:
    """The announcements of arriving chunks on one stream: each chunk once, with a pause between two HAVEs."""

    def __init__(self, arrivals: Arrivals, pause_s: float) -> None:
        self._arrivals, self._pause_s = arrivals, pause_s
        self._count = self._last = 0
        """Number of chunks announced, and the sequence number of the last (`Arrivals.news_after`)."""
        self._announced_at = -math.inf
        self.due_at = -math.inf
        """Time of the next announcement; `inf`: there is nothing to announce."""

    def schedule(self) -> bool:
        """Schedule an announcement; return False if one is scheduled already."""
        is_new = self.due_at == math.inf
        self.due_at = min(self.due_at, self._announced_at + self._pause_s)
        return is_new

    def start_announcement(self) -> tuple[ChunkId, ...]:
        """Return the chunks to announce now, and record them as announced; clear a due time at which there are none."""
        now = trio.current_time()
        if now < self.due_at:
            return ()
        at_most = min(limits.EXCHANGE_HAVE_NAMES_MAX, limits.EXCHANGE_HAVE_TOTAL_MAX - self._count)
        chunks, self._last = self._arrivals.news_after(self._last, at_most)
        self._count += len(chunks)
        if chunks:
            self._announced_at = now
        else:
            self.due_at = math.inf
        return tuple(chunks)


class _Conversation:
    """Server side of one stream: a reader records WANTs, a writer answers those that can be answered."""

    def __init__(self, server: ChunkServer, link: Link) -> None:
        self._server, self._link, self._limits = server, link, server.limits
        self._responder = Responder()
        self._replies: deque[Reject] = deque()
        self._ready: dict[ChunkId, None] = {}
        """Owed chunks that are stored, in the order of the answers."""
        self._waiting: dict[ChunkId, float] = {}
        """Owed chunks that have not arrived yet, with the time of the WANT."""
        self._is_behind = False
        """The requester has less than other nodes, by its last WANT."""
        self._small_frames = 0
        """Frames sent in this turn, before its chunk."""
        self._announcements = _Announcements(server.arrivals, self._limits.news_s)
        self._idle_at = trio.current_time() + self._limits.idle_s
        self._changed, self._sent = trio.Event(), trio.Event()
        self._farewell = Farewell.DONE
        self._failure: PeerFault | None = None

    async def run(self) -> Farewell:
        """Serve the stream until the requester leaves or is idle for too long."""
        try:
            with self._server.arrivals.listening(self._refresh):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._read, nursery.cancel_scope)
                    nursery.start_soon(self._write, nursery.cancel_scope)
        finally:
            self._server.end_turn(self._link)
            self._server.admit()
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
                        self._is_behind = message.is_behind
                        await self._place(message.chunk)
                    self._changed.set()
                while len(self._replies) > limits.EXCHANGE_WANTS_MAX:  # it asks and cancels faster than it reads
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

    async def _place(self, chunk: ChunkId) -> None:
        """Decide about a new WANT: answer, or wait. Its time starts before the disk is checked, which may be slow."""
        arrivals = self._server.arrivals
        if chunk in arrivals.held_chunks:
            self._ready[chunk] = None
            return
        self._waiting[chunk] = asked_at = trio.current_time()
        if not arrivals.expects(chunk):
            self._waiting[chunk] += self._limits.wait_s - self._limits.grace_s  # it may be stored
            self._changed.set()
            is_stored = await self._server.has(chunk)
            if chunk in self._waiting:  # not if it arrived or was rejected meanwhile
                self._waiting[chunk] = asked_at
                if is_stored:
                    del self._waiting[chunk]
                    self._ready[chunk] = None

    def _absent_at(self, chunk: ChunkId) -> float:
        """Return the time at which an owed chunk is rejected as absent."""
        expected = self._server.arrivals.expects(chunk)
        return self._waiting[chunk] + (self._limits.wait_s if expected else self._limits.grace_s)

    def _forget(self, chunk: ChunkId) -> None:
        """Drop a WANT that is answered or cancelled."""
        self._ready.pop(chunk, None)
        self._waiting.pop(chunk, None)

    def _refresh(self) -> None:
        """Handle a change in the chunks that have arrived or are expected."""
        arrivals = self._server.arrivals
        matters = self._announcements.schedule()  # otherwise the writer is scheduled already
        for chunk in list(self._waiting):
            if chunk in arrivals.held_chunks:
                del self._waiting[chunk]
                self._ready[chunk] = None
                matters = True
            elif not arrivals.expects(chunk):
                matters = True  # the chunk is not expected any more
        if matters:
            self._changed.set()

    async def _next_step(self) -> bool:
        """Send one frame, or wait for something to send; return False when the requester was idle for too long."""
        has_turn = self._has_turn()
        chunk_is_due = has_turn and self._small_frames >= limits.EXCHANGE_WANTS_MAX
        if not chunk_is_due and (frame := self._small_frame()):
            self._small_frames += has_turn
            await self._send(frame)
        elif has_turn:
            await self._answer()
        else:
            self._ask_for_turn()
            return self._has_turn() or await self._wait()
        return True

    def _small_frame(self) -> Reject | Have | None:
        """Return the next frame to send before the chunk, if any."""
        if self._replies:
            return self._replies.popleft()
        chunks = self._announcements.start_announcement()
        return Have(chunks) if chunks else None

    def _has_turn(self) -> bool:
        return self._server.turns.is_sending(self._link)

    def _ask_for_turn(self) -> None:
        """Queue for a turn if there is a chunk to send."""
        if self._ready:
            self._server.ask_for_turn(self._link, is_behind=self._is_behind, wake=self._wake)
        else:
            self._server.end_turn(self._link)
        self._server.admit()

    def _wake(self) -> None:
        self._changed.set()

    async def _wait(self) -> bool:
        self._changed = trio.Event()
        turns = self._server.turns
        turn_at = turns.look_again_at(self._link, trio.current_time())
        idle_at = math.inf if self._responder.owed or self._server.arrivals.expecting_any else self._idle_at
        with trio.move_on_at(min(idle_at, self._announcements.due_at, turn_at, *map(self._absent_at, self._waiting))):
            await self._changed.wait()
        now = trio.current_time()
        if self._ready and turns.waits_in_vain(self._link, now):
            self._server.end_turn(self._link)
            self._reject(next(iter(self._ready)), Reason.BUSY)
        for chunk in [chunk for chunk in self._waiting if now >= self._absent_at(chunk)]:
            self._reject(chunk, Reason.ABSENT)
        if now >= idle_at and not self._responder.owed:
            self._farewell = Farewell.IDLE
            return False
        return True

    async def _answer(self) -> None:
        """Send one CHUNK or REJECT, to the oldest WANT that can be answered; then queue again for the next."""
        if self._ready:  # otherwise every WANT was cancelled meanwhile
            await self._send_chunk(next(iter(self._ready)))
        self._server.end_turn(self._link)
        self._small_frames = 0
        self._ask_for_turn()

    async def _send_chunk(self, chunk: ChunkId) -> None:
        self._responder.start_answer(chunk)
        self._forget(chunk)
        try:
            data = self._server.arrivals.fresh(chunk)
            if data is None:
                data = await trio.to_thread.run_sync(self._server.blobs.read, chunk)
        except (UnknownChunk, DiskFull):
            await self._send(self._responder.reject(chunk, Reason.ABSENT))
            return
        if not await self._server.meter(len(data)):
            await self._send(self._responder.reject(chunk, Reason.BUSY))
            return
        await self._send(self._responder.chunk(chunk, data))
        self._server.record_delivery(self._link.peer, len(data))

    def _reject(self, chunk: ChunkId, reason: Reason) -> None:
        self._forget(chunk)
        if chunk in self._responder.owed:
            self._replies.append(self._responder.reject(chunk, reason))

    async def _send(self, message: Chunk | Reject | Have) -> None:
        """Send a frame, unless the requester reads too slowly while other streams wait for a turn."""
        with trio.CancelScope() as scope:
            self._server.takers[self._link] = scope
            try:
                await self._link.send(message, stall_s=self._limits.stall_s)
            finally:
                del self._server.takers[self._link]
        if scope.cancelled_caught:
            slow, turn_s = self._link.peer, self._limits.turn_s
            raise PeerStalled(f"Peer {slow} took no slice of a chunk for {turn_s:g} s, and others wait.")
        self._sent.set()
        self._idle_at = trio.current_time() + self._limits.idle_s
