"""The muxer of a connection: `YamuxMachine` with a socket, tasks and waiting streams.

- Three tasks per connection: one reads and never waits for a consumer, one writes the machine's output, one ticks.
  The first that fails ends the connection, and all its readers and writers wake with the reason.
- Only the peer's FIN ends a stream cleanly: the end of the connection is a reset.
- `write` returns when the kernel has its last byte. It waits for a slow reader as long as its caller does; if it is
  cancelled half way, it resets its stream, and the connection continues.
- A peer's fault ends its connection and raises nothing elsewhere.
"""

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

import trio
from libp2p.abc import IMuxedConn, IMuxedStream, ISecureConn
from libp2p.connection_types import ConnectionType
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import (
    MuxedConnUnavailable,
    MuxedStreamClosed,
    MuxedStreamEOF,
    MuxedStreamReset,
)
from multiaddr import Multiaddr

from protocol.errors import SwarmError
from swarm_node.p2p.noise import ConnectionLost, NoiseSession
from swarm_node.p2p.yamux_machine import (
    FRAME_MAX_BYTES,
    Arrived,
    Ended,
    Event,
    Left,
    NoStream,
    Opened,
    Reset,
    YamuxMachine,
)
from swarm_node.p2p.yamux_stream import MuxLimits, ReceiveBudget

log = logging.getLogger(__name__)

FAREWELL_S = 1.0
TICK_S = 10.0
"""A dead or frozen peer is detected after two to three of these."""


class _Inbox:
    """Received bytes that wait for a reader. Pieces of less than half a frame are copied together, so that a small
    piece does not keep its whole message in memory."""

    def __init__(self) -> None:
        self._pieces: deque[memoryview | bytearray] = deque()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def put(self, piece: memoryview) -> None:
        self._size += len(piece)
        if 2 * len(piece) >= FRAME_MAX_BYTES:
            self._pieces.append(piece)
        elif self._pieces and isinstance(last := self._pieces[-1], bytearray):
            last += piece
        else:
            self._pieces.append(bytearray(piece))

    def pop(self, size_max: int | None) -> bytes:
        taken: list[memoryview | bytearray] = []
        left = size_max
        while self._pieces and left != 0:
            piece = self._pieces.popleft()
            if left is not None and len(piece) > left:
                self._pieces.appendleft(piece[left:])
                piece = piece[:left]
            left = None if left is None else left - len(piece)
            taken.append(piece)
            self._size -= len(piece)
        return b"".join(taken)

    def clear(self) -> None:
        self._pieces.clear()
        self._size = 0


class YamuxStream(IMuxedStream):
    """Stream of a multiplexed connection."""

    def __init__(self, conn: "YamuxConnection", stream_id: int) -> None:
        self.muxed_conn: YamuxConnection = conn
        self.stream_id = stream_id
        self.inbox = _Inbox()
        self.enough = 1
        """Bytes that the next read waits for, unless the stream ends first; never more than half a first window."""
        self.ended = False
        """The peer has sent FIN."""
        self.broken: Exception | None = None
        """Reason why neither direction works any more."""
        self.writing = False
        self.news = trio.lowlevel.ParkingLot()
        self._writer = trio.Lock()

    async def read(self, n: int | None = None) -> bytes:
        """Return up to `n` bytes, as soon as `enough` have arrived; EOF only after the peer's FIN."""
        if self._has_enough:
            await trio.lowlevel.checkpoint()
        while not self._has_enough:
            await self.news.park()
        if not self.inbox:
            if self.ended:
                raise MuxedStreamEOF("The peer has sent all it has.")
            raise MuxedStreamReset(str(self.broken)) from self.broken
        data = self.inbox.pop(None if n is None or n < 0 else n)
        self.muxed_conn.machine.read(self.stream_id, len(data))
        self.muxed_conn.changed()
        return data

    async def write(self, data: bytes | memoryview) -> None:
        """Write all of `data`; return when the kernel has it."""
        async with self._writer:
            self._require_writable()
            if not data:
                return
            machine = self.muxed_conn.machine
            machine.write(self.stream_id, memoryview(data))
            self.writing = True
            self.muxed_conn.changed()
            try:
                while self.writing:
                    if self.broken is not None:
                        raise MuxedStreamReset(str(self.broken)) from self.broken
                    await self.news.park()
            except trio.Cancelled:
                if machine.withdraw(self.stream_id):
                    self._give_up()
                raise
            finally:
                self.writing = False

    async def close_write(self) -> None:
        """Send FIN after the written data; reading continues."""
        self.muxed_conn.machine.finish(self.stream_id)
        self.muxed_conn.changed()
        await trio.lowlevel.checkpoint()

    async def close(self) -> None:
        """Send FIN after the written data, and stop reading."""
        self.inbox.clear()
        self.muxed_conn.machine.finish(self.stream_id)
        self.muxed_conn.machine.stop_reading(self.stream_id)
        self.break_off(MuxedStreamClosed("We closed the stream."))
        self.muxed_conn.changed()
        await trio.lowlevel.checkpoint()

    async def reset(self) -> None:
        """Reset both directions; this never waits for the peer."""
        self._give_up()
        await trio.lowlevel.checkpoint()

    def break_off(self, reason: Exception) -> None:
        """Wake reader and writer with the reason."""
        self.broken = self.broken or reason
        self.news.unpark_all()

    @property
    def is_closed(self) -> bool:
        return self.broken is not None

    def set_deadline(self, ttl: int) -> None:
        # libp2p's interface requires the method, but nothing calls it; a no-op would promise a deadline without one.
        raise NotImplementedError("Put a trio cancel scope around the call instead.")

    def get_remote_address(self) -> tuple[str, int] | None:
        return self.muxed_conn.get_remote_address()

    async def __aenter__(self) -> "YamuxStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def _has_enough(self) -> bool:
        return len(self.inbox) >= self.enough or self.ended or self.broken is not None

    def _require_writable(self) -> None:
        if self.broken is not None:
            raise MuxedStreamReset(str(self.broken)) from self.broken
        if not self.muxed_conn.machine.may_write(self.stream_id):
            raise MuxedStreamClosed("The stream is closed for writing.")

    def _give_up(self) -> None:
        self.inbox.clear()
        self.muxed_conn.machine.reset(self.stream_id)
        self.break_off(MuxedStreamReset("We gave the stream up."))
        self.muxed_conn.changed()


class YamuxConnection(IMuxedConn):
    """Multiplexed connection, as libp2p's swarm expects it."""

    def __init__(
        self,
        conn: ISecureConn,
        peer_id: ID,
        *,
        host_budget: ReceiveBudget | None = None,
        mux_limits: MuxLimits | None = None,
        tick_s: float = TICK_S,
    ) -> None:
        assert isinstance(conn, NoiseSession)
        self.secured_conn, self.peer_id, self._tick_s = conn, peer_id, tick_s
        self.machine = YamuxMachine(initiator=conn.is_initiator, limits=mux_limits, host=host_budget)
        self.streams: dict[int, YamuxStream] = {}
        self.on_close: Callable[[], Awaitable[Any]] | None = None
        self.event_started, self.event_closed = trio.Event(), trio.Event()
        self.broken: Exception | None = None
        self._scope = trio.CancelScope()
        self._backlog: deque[YamuxStream] = deque()
        self._opened, self._output, self._drained = (trio.lowlevel.ParkingLot() for _ in range(3))
        self._sending = False

    @property
    def is_initiator(self) -> bool:
        return self.secured_conn.is_initiator

    @property
    def is_established(self) -> bool:
        return self.event_started.is_set() and self.broken is None

    @property
    def is_closed(self) -> bool:
        return self.event_closed.is_set()

    async def start(self) -> None:
        """Run the connection to its end; no error of the connection is raised."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    for loop in (self._receive, self._send, self._tick):
                        nursery.start_soon(self._run, loop)
                    self.event_started.set()
        finally:
            await self._finish()

    async def open_stream(self) -> YamuxStream:
        await trio.lowlevel.checkpoint()
        self._require_alive()
        try:
            stream_id = self.machine.open()
        except NoStream as error:
            raise MuxedConnUnavailable(str(error)) from error
        stream = self.streams[stream_id] = YamuxStream(self, stream_id)
        self.changed()
        return stream

    async def accept_stream(self) -> YamuxStream:
        await trio.lowlevel.checkpoint()
        while True:
            self._require_alive()
            if self._backlog:
                stream = self._backlog.popleft()
                self.machine.accept(stream.stream_id)
                self.changed()
                return stream
            await self._opened.park()

    async def close(self) -> None:
        """Send GO_AWAY and the pending output, then end the connection; wait at most 1 s for the peer to read."""
        if self.broken is None:
            self.machine.leave()
            self._output.unpark_all()
            with trio.move_on_after(FAREWELL_S):
                while not self.is_closed and (self._sending or self.machine.has_output):
                    await self._drained.park()
        await self.cut()

    async def cut(self) -> None:
        """End the connection without GO_AWAY."""
        self._end(ConnectionLost("We closed the connection."))
        if self.event_started.is_set():
            await self.event_closed.wait()
        else:
            await self._finish()

    def changed(self) -> None:
        """Apply a change of the machine: forget ended streams, wake the writer if there is output."""
        for stream_id in self.machine.gone():
            stream = self.streams.pop(stream_id, None)
            if stream is not None and stream.writing:
                stream.break_off(MuxedStreamReset("The stream is over."))
        if self.machine.has_output:
            self._output.unpark_all()

    def get_transport_addresses(self) -> list[Multiaddr]:
        return self.secured_conn.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        return self.secured_conn.get_connection_type()

    def get_remote_address(self) -> tuple[str, int] | None:
        return self.secured_conn.get_remote_address()

    async def _run(self, loop: Callable[[], Awaitable[None]]) -> None:
        try:
            await loop()
        except SwarmError as error:
            self._end(error)
        except Exception as error:  # a transport error; it ends this connection only
            log.debug("connection to %s ended", self.peer_id, exc_info=error)
            self._end(ConnectionLost(f"The connection broke ({type(error).__name__})."))

    async def _receive(self) -> None:
        while True:
            for plaintext in await self.secured_conn.receive():
                for event in self.machine.receive(plaintext):
                    self._on_event(event)
            self.changed()

    async def _send(self) -> None:
        while True:
            while not self.machine.has_output:
                self._drained.unpark_all()
                await self._output.park()
            self._sending = True
            size_bytes = await self.secured_conn.writable()
            await self.secured_conn.send(self.machine.output(size_bytes))
            self._sending = False
            for stream_id in self.machine.written():
                if (stream := self.streams.get(stream_id)) is not None:
                    stream.writing = False
                    stream.news.unpark_all()
            self.changed()

    async def _tick(self) -> None:
        while True:
            await trio.sleep(self._tick_s)
            self.machine.tick()
            self.changed()

    def _on_event(self, event: Event) -> None:
        match event:
            case Opened(stream_id):
                stream = self.streams[stream_id] = YamuxStream(self, stream_id)
                self._backlog.append(stream)
                self._opened.unpark_all()
            case Arrived(stream_id, data):
                stream = self.streams[stream_id]
                stream.inbox.put(data)
                if len(stream.inbox) >= stream.enough:
                    stream.news.unpark_all()
            case Ended(stream_id):
                stream = self.streams[stream_id]
                stream.ended = True
                stream.news.unpark_all()
            case Reset(stream_id):
                stream = self.streams.pop(stream_id)
                if self.is_initiator != bool(stream_id % 2):  # streams that we opened carry data we asked for
                    stream.inbox.clear()
                stream.break_off(MuxedStreamReset("The peer reset the stream."))
                if stream in self._backlog:
                    self._backlog.remove(stream)
            case Left(reason):
                if reason:
                    raise ConnectionLost(f"The peer ended the connection with code {reason}.")

    def _require_alive(self) -> None:
        if self.broken is not None:
            raise MuxedConnUnavailable(str(self.broken)) from self.broken

    def _end(self, reason: Exception) -> None:
        """End the connection; only the first reason counts."""
        if self.broken is None:
            self.broken = reason
            self._scope.cancel()
            for stream in self.streams.values():
                stream.break_off(reason)
            self._opened.unpark_all()

    async def _finish(self) -> None:
        """Free everything; the socket is closed first, so that the peer learns of the end."""
        if self.event_closed.is_set():
            return
        self._end(ConnectionLost("The host stopped."))
        with trio.CancelScope(shield=True):
            with trio.move_on_after(FAREWELL_S):
                await self.secured_conn.close()
            self.machine.end()
            self.streams.clear()
            self._backlog.clear()
            self.event_closed.set()
            self._drained.unpark_all()
            if self.on_close is not None:
                await self.on_close()
