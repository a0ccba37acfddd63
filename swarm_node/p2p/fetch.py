"""Requests for chunks to one upstream, several at a time; verified chunks are stored.

- The peer at the other end is authenticated; its chunks are verified before they are written.
- A peer that owes chunks and neither answers nor begins to send one for `patience_s` is dropped. One WANT may take
  longer: it waits behind others, or at the peer for a chunk that has not arrived there yet. The picker decides which
  other peer to ask meanwhile.
- With `patient=True` a failed connection is retried at growing intervals for `patience_s`: a full host closes a
  connection without giving a reason.
- The first failure ends the upstream, with exactly one final outcome: `UpstreamFailed`, `Lied` or `Broke`. The other
  final outcome is `Parted`: a peer closes a stream that is idle for a while, which is no failure.
- Chunks are stored in parallel. All downloads of a process share the memory for chunks that arrive or wait for the disk
  (`ChunkMemory`): when it is full, an upstream stops reading, which its peer notices by the window. This wait does not
  count as the peer's. Peers that send slowly on purpose hold that memory for `patience_s` each; the origin's chunks, a
  few at a time, do not wait for it.
- A chunk that was not requested ends the upstream when its name has arrived: no deadline would bound its memory.
- Chunks that have arrived are verified and stored before the final outcome, for at most `store_s`, whatever ended the
  exchange. So a peer that sends wrong bytes and disconnects has lied. `Lied` outranks any other outcome, and a failure
  of this node outranks one of the peer.
"""

import math
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass

import trio

from protocol import limits
from protocol.errors import ChunkMismatch, PeerFault, SwarmError
from protocol.ids import ChunkId
from protocol.policy.chunks import chunk_id
from protocol.wire.exchange import Requester
from protocol.wire.frames import Bye, Cancel, Chunk, Farewell, Have, Reason, Reject, Want
from protocol.work.messages import Peer
from swarm_node.chunks.blobs import BlobStore
from swarm_node.p2p.host import Host
from swarm_node.p2p.link import Link, PeerStalled, PeerVanished

KNOCK_MAX_S = 10.0
"""Longest pause between two tries: a thousand nodes then make 100 tries per second, cheap even for a full host."""


@dataclass(frozen=True)
class Deadlines:
    """Deadlines of one upstream."""

    dial_s: float = 10.0
    patience_s: float = 60.0
    """The limit from one answer, or its first bytes, to the next: 4 MiB at 70 kB/s, the slowest useful peer; and longer
    than a WANT may wait there. Also the time for retrying a connection, and for a chunk from the origin."""
    stall_s: float = 20.0
    """The limit for a WANT to be sent."""
    store_s: float = 10.0
    """The limit for arrived chunks to be verified and stored, once the exchange is over."""
    knock_s: float = 0.5
    """The pause before the second try of a failed connection; doubled with each further one."""


@dataclass(frozen=True)
class Delivered:
    """A chunk is verified and on the disk."""

    source: str
    chunk: ChunkId
    data: bytes


@dataclass(frozen=True)
class ChunksAnnounced:
    """The upstream reports that it holds these chunks."""

    source: str
    chunks: tuple[ChunkId, ...]


@dataclass(frozen=True)
class ChunkBegan:
    """The first bytes of a requested chunk have arrived."""

    source: str
    chunk: ChunkId


@dataclass(frozen=True)
class ChunkRefused:
    """The upstream answered without the chunk."""

    source: str
    chunk: ChunkId
    reason: Reason


@dataclass(frozen=True)
class UpstreamFailed:
    """The upstream is lost; every chunk requested from it and not delivered is open again."""

    source: str
    error: SwarmError


@dataclass(frozen=True)
class IdleStreamClosed:
    """The upstream closed an idle stream; chunks that were requested at that moment are open again."""

    source: str


@dataclass(frozen=True)
class SentWrongBytes:
    """Evidence that the upstream sent other bytes under a chunk's name."""

    source: str
    chunk: ChunkId
    got: ChunkId


@dataclass(frozen=True)
class LocalFault:
    """Failure of this node: it cannot continue, for example because its disk is full."""

    error: SwarmError


Outcome = (
    Delivered
    | ChunksAnnounced
    | ChunkBegan
    | ChunkRefused
    | UpstreamFailed
    | IdleStreamClosed
    | SentWrongBytes
    | LocalFault
)


class _WrongBytes(Exception):
    def __init__(self, chunk: ChunkId, got: ChunkId) -> None:
        self.chunk, self.got = chunk, got


class _IdleStream(Exception):
    """The peer closed the stream, because nothing was requested for a while."""


class ChunkMemory:
    """The memory for chunks that arrive, or have arrived and are not stored yet; one for all downloads."""

    def __init__(self, max_bytes: int = limits.ARRIVING_CHUNKS_MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._waiting = trio.lowlevel.ParkingLot()
        self.held_bytes = 0

    async def reserve(self, size_bytes: int) -> None:
        """Wait until there is room; a chunk alone always has it."""
        while self.held_bytes and self.held_bytes + size_bytes > self._max_bytes:
            await self._waiting.park()
        self.hold(size_bytes)

    def hold(self, size_bytes: int) -> None:
        """Count a chunk that must not wait."""
        self.held_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        """Return what was reserved or held."""
        self.held_bytes -= size_bytes
        self._waiting.unpark_all()


class Upstream:
    """Stream to one peer: `ask` requests a chunk, `take_back` cancels the request, `run` receives chunks."""

    def __init__(
        self,
        host: Host,
        peer: Peer,
        blobs: BlobStore,
        sizes: Mapping[ChunkId, int],
        outcomes: trio.MemorySendChannel[Outcome],
        deadlines: Deadlines,
        *,
        memory: ChunkMemory | None = None,
        patient: bool = False,
    ) -> None:
        self.peer = peer
        """Changes when a later plan lists the peer with other data."""
        self.is_open = False
        """True while there is a stream to the peer, or if there was until the final outcome."""
        self.heard_at = -math.inf
        """Time at which the last bytes from the peer arrived."""
        self._host, self._blobs, self._sizes = host, blobs, sizes
        self._outcomes, self._deadlines, self._is_patient = outcomes, deadlines, patient
        self._orders_in, self._orders = trio.open_memory_channel[Want | Cancel](2 * limits.EXCHANGE_WANTS_MAX)
        self._memory = memory or ChunkMemory()
        self._reserved_bytes = 0
        """Memory of the chunk that is arriving."""
        self._waits_for_memory = False
        self._requester = Requester()
        self._patience = trio.CancelScope()
        self._stores: set[trio.CancelScope] = set()
        self._stored_by = math.inf
        self._failure: Exception | None = None

    def ask(self, chunk: ChunkId, *, is_behind: bool = False) -> None:
        """Request one more chunk; at most `EXCHANGE_WANTS_MAX` may be undelivered."""
        self._orders_in.send_nowait(Want(chunk, is_behind))

    def take_back(self, chunk: ChunkId) -> None:
        """Cancel the request for a chunk; the chunk may still arrive."""
        self._orders_in.send_nowait(Cancel(chunk))

    async def run(self) -> None:
        """Serve `ask` until the first failure, which is reported and not raised; when cancelled, close with a BYE."""
        try:
            link = await self._connect()
            self.is_open = True
            await self._exchange(link)
        except _WrongBytes as wrong:
            await self._report(SentWrongBytes(self.peer.peer_id, wrong.chunk, wrong.got))
        except _IdleStream:
            await self._report(IdleStreamClosed(self.peer.peer_id))
        except PeerFault as error:
            await self._report(UpstreamFailed(self.peer.peer_id, error))
        except SwarmError as error:
            await self._report(LocalFault(error))

    async def _connect(self) -> Link:
        knock_s, until = self._deadlines.knock_s, trio.current_time() + self._deadlines.patience_s
        while True:
            try:
                return await self._host.connect(
                    self.peer,
                    dial_s=self._deadlines.dial_s,
                    chunk_max_bytes=max(self._sizes.values(), default=0),
                )
            except (PeerVanished, PeerStalled):
                if not self._is_patient or trio.current_time() + knock_s >= until:
                    raise
            await trio.sleep(knock_s)
            knock_s = min(2 * knock_s, KNOCK_MAX_S)

    async def _exchange(self, link: Link) -> None:
        try:
            async with trio.open_nursery() as storing:
                try:
                    async with trio.open_nursery() as talking:

                        def store(answer: Chunk) -> None:
                            storing.start_soon(self._run_or_end, talking, self._store(answer))

                        talking.start_soon(self._run_or_end, talking, self._send_orders(link))
                        talking.start_soon(self._run_or_end, talking, self._receive_in_time(link, store))
                finally:
                    self._store_until(trio.current_time() + self._deadlines.store_s)
        finally:
            if isinstance(self._failure, PeerVanished | _IdleStream):
                await link.abort()
            else:
                self._host.part(link, Farewell.FAULT if self._failure else Farewell.DONE)
        if self._failure is not None:
            raise self._failure

    async def _run_or_end(self, talking: trio.Nursery, step: Coroutine[None, None, None]) -> None:
        """Run a part of the conversation, or store a chunk from it; any failure ends the conversation."""
        try:
            await step
        except (SwarmError, _WrongBytes, _IdleStream) as error:
            if self._failure is None or _rank(error) > _rank(self._failure):
                self._failure = error
            talking.cancel_scope.cancel()

    async def _send_orders(self, link: Link) -> None:
        async for order in self._orders:
            message: Want | Cancel | None
            if isinstance(order, Want):
                owed_nothing = not self._requester.unanswered
                size_bytes = self._sizes[order.chunk]
                message = self._requester.want(order.chunk, size_bytes, is_behind=order.is_behind)
                if owed_nothing:
                    self._restart_patience()
            else:
                message = self._requester.cancel(order.chunk)
            if message is not None:
                await link.send(message, stall_s=self._deadlines.stall_s)

    async def _receive_in_time(self, link: Link, store: Callable[[Chunk], None]) -> None:
        try:
            with self._patience:
                await self._receive_answers(link, store)
        finally:
            self._memory.release(self._reserved_bytes)
        raise PeerStalled(f"Peer {link.peer} left {self._requester.unanswered} chunks unanswered.")

    async def _receive_answers(self, link: Link, store: Callable[[Chunk], None]) -> None:
        arriving: ChunkId | None = None
        while True:
            messages = await link.receive()
            self.heard_at = trio.current_time()
            for message in messages:
                answer = self._requester.receive(message)
                if isinstance(answer, Bye):
                    if answer.reason is Farewell.IDLE:
                        raise _IdleStream
                    raise PeerVanished(f"Peer {link.peer} ended the exchange ({answer.reason.name.lower()}).")
                if isinstance(answer, Have):
                    await self._report(ChunksAnnounced(link.peer, answer.chunks))
                    continue
                self._restart_patience()
                if isinstance(answer, Reject):
                    await self._report(ChunkRefused(link.peer, answer.chunk, answer.reason))
                else:
                    await self._reserve(len(answer.data))
                    self._reserved_bytes = 0  # `_store` releases it
                    store(answer)
                    arriving = None  # the next one may have the same name
            if link.arriving != arriving:
                arriving = link.arriving
                if arriving:
                    self._requester.require_awaited(arriving)
                    self._restart_patience()
                    await self._report(ChunkBegan(link.peer, arriving))
                    await self._reserve(self._sizes[arriving])

    async def _reserve(self, size_bytes: int) -> None:
        """Reserve the memory of the chunk that is arriving, unless that was done when its first bytes came."""
        if self._reserved_bytes:
            return
        self._waits_for_memory = True
        self._restart_patience()
        await self._memory.reserve(size_bytes)
        self._reserved_bytes = size_bytes
        self._waits_for_memory = False
        self._restart_patience()

    async def _store(self, answer: Chunk) -> None:
        """Verify a chunk and write it; after the deadline, a hanging write and its chunk are abandoned."""
        try:
            await self._store_reserved(answer)
        finally:
            self._memory.release(len(answer.data))

    async def _store_reserved(self, answer: Chunk) -> None:
        with trio.CancelScope(shield=True, deadline=self._stored_by) as scope:
            self._stores.add(scope)
            try:
                await trio.to_thread.run_sync(self._blobs.write, answer.chunk, answer.data, abandon_on_cancel=True)
            except ChunkMismatch:
                raise _WrongBytes(answer.chunk, chunk_id(answer.data)) from None
            finally:
                self._stores.discard(scope)
        if not scope.cancelled_caught:
            await self._report(Delivered(self.peer.peer_id, answer.chunk, answer.data))

    def _store_until(self, time_s: float) -> None:
        """Set the time by which the chunks of the ended conversation must be stored."""
        self._stored_by = time_s
        for scope in self._stores:
            scope.deadline = time_s

    async def _report(self, news: Outcome) -> None:
        with suppress(trio.BrokenResourceError):  # the download has ended meanwhile
            try:
                self._outcomes.send_nowait(news)
            except trio.WouldBlock:
                await self._outcomes.send(news)

    def _restart_patience(self) -> None:
        """Restart the patience deadline, since the peer is alive, or is not read."""
        is_due = self._requester.unanswered and not self._waits_for_memory
        self._patience.deadline = trio.current_time() + (self._deadlines.patience_s if is_due else math.inf)


def _rank(failure: Exception) -> int:
    """Return the rank of a failure; the higher one is reported: a lie first, then a failure of this node."""
    return 2 if isinstance(failure, _WrongBytes) else int(not isinstance(failure, PeerFault | _IdleStream))
