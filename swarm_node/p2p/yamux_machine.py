"""Yamux as a state machine: bytes in, events out; commands in, bytes out. No socket, task or clock.

Rules for both sides; a peer that breaks one gets `MuxViolation` and loses its connection:

- No side sends beyond the receiver's window; an excess is detected at the header, before the data. Data for a stream
  that has ended counts against what its window still allowed.
- A stream ends by FIN in each direction or by RST in both. A stream that we closed and do not read, and that the peer
  leaves open, is reset after some ticks.
- Frames cost: each tick pays for `frames_per_tick` frames, and each KiB of payload, in either direction, for one more.
  A message that completes no header costs as much as a frame, since it has to be decrypted. So floods of pings, resets,
  tiny updates or empty messages end the connection, and honest traffic does not.
- So do unknown kinds or flags, frames for a stream that was never opened, data after FIN, a window above 2^32 - 1, and
  GO_AWAY with a code other than 0.
- `tick` is the only clock. A peer that is silent for a whole tick is pinged, and after two it is `PeerSilent`.

Streams that may send take turns, one frame each; control frames go before all data.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from swarm_node.p2p.yamux_frames import (
    HEADER_BYTES,
    INITIAL_WINDOW_BYTES,
    LENGTH_MAX,
    Flag,
    FrameFlood,
    FrameHeader,
    FrameKind,
    MuxViolation,
    PeerSilent,
    WindowExceeded,
    YamuxFrameReader,
    pack,
)
from swarm_node.p2p.yamux_stream import Act, MuxLimits, ReceiveBudget, Stream, StreamState

FRAME_MAX_BYTES = 65519
"""A frame is one Noise message: 65535 bytes, less 16 for its tag."""
BODY_MAX_BYTES = FRAME_MAX_BYTES - HEADER_BYTES
CRUMB_BYTES = 1024
"""A remainder of at most this size is sent with the frame before it: it is not worth a message of its own."""
HEAD_BYTES = 64
"""The first bytes of a long write are sent in a frame of their own: otherwise its reader learns that it has begun only
when the first frame is complete, 0.2 s later on a link of 2 Mbit/s."""
_FRAME_COST = 1024
"""A frame costs as much as a KiB of payload earns."""


class NoStream(Exception):
    """The stream limit, the memory for windows, or a GO_AWAY prevents opening a stream."""


class Opened(NamedTuple):
    """The peer opened a stream; it waits to be accepted."""

    stream: int


class Arrived(NamedTuple):
    """Data for the application."""

    stream: int
    data: memoryview


class Ended(NamedTuple):
    """The peer has sent all its data and FIN: the clean end."""

    stream: int


class Reset(NamedTuple):
    """The peer reset the stream; the data it sent before is incomplete."""

    stream: int


class Left(NamedTuple):
    """The peer opens and accepts no more streams."""

    reason: int


Event = Opened | Arrived | Ended | Reset | Left


class YamuxMachine:
    """State machine of one end of a connection."""

    def __init__(self, *, initiator: bool, limits: MuxLimits | None = None, host: ReceiveBudget | None = None) -> None:
        self._limits = limits or MuxLimits()
        self.budget = ReceiveBudget(self._limits.receive_max_bytes, host)
        self._streams: dict[int, Stream] = {}
        self._next_name = 1 if initiator else 2
        self._peer_names = 0 if initiator else 1
        """Parity of the peer's stream names: 0 or 1."""
        self._peer_name_max = 0
        self._reader = YamuxFrameReader()
        self._body: tuple[int, int, int] = (0, 0, 0)
        """Stream, flags and missing bytes of the body that is arriving."""
        self._forfeited = 0
        """Bytes that ended streams were still allowed to receive."""
        self._control = bytearray()
        self._turns: deque[Stream] = deque()
        self._written: list[int] = []
        self._gone: list[int] = []
        self._allowance = self._limits.frames_per_tick * _FRAME_COST
        self._heard, self._silent_ticks, self._pings = True, 0, 0
        self._peer_left = self._left = False

    # Commands of the application.

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, name: int) -> bool:
        """Return True if the stream has not ended yet."""
        return name in self._streams

    def open(self) -> int:
        """Open a stream; its first window is advertised with it."""
        if self._peer_left or self._left:
            raise NoStream("One side has said goodbye.")
        if self._is_full(ours=True) or self._next_name > LENGTH_MAX:
            raise NoStream(f"{len(self)} streams are open; close one first.")
        if not self.budget.reserve(INITIAL_WINDOW_BYTES):
            raise NoStream("The windows of other streams use all the memory for received bytes.")
        stream = Stream(self._next_name, ours=True, budget=self.budget)
        self._next_name += 2
        self._streams[stream.name] = stream
        self._say(FrameKind.WINDOW_UPDATE, Flag.SYN, stream.name, stream.widen(self._limits.window_open_bytes))
        return stream.name

    def accept(self, name: int) -> None:
        """Accept a stream that the peer opened."""
        self._streams[name].accepted = True
        self._say(FrameKind.WINDOW_UPDATE, Flag.ACK, name, 0)

    def may_write(self, name: int) -> bool:
        """Return True if our direction of a stream is open."""
        return name in self._streams and self._streams[name].writable

    def write(self, name: int, data: memoryview) -> None:
        """Queue data; `written` returns the stream once all of it is sent."""
        stream = self._streams[name]
        assert stream.writable
        assert data
        assert not stream.unsent
        has_head = len(data) > BODY_MAX_BYTES // 4
        stream.unsent.extend((data[:HEAD_BYTES], data[HEAD_BYTES:]) if has_head else (data,))
        self._queue(stream)

    def withdraw(self, name: int) -> bool:
        """Drop the unsent data of `write`; return False if there was none."""
        stream = self._streams.get(name)
        if stream is None or not stream.unsent:
            return False
        stream.unsent.clear()
        self._unqueue(stream)
        return True

    def finish(self, name: int) -> None:
        """Queue FIN, after the written data."""
        if self.may_write(name):
            stream = self._streams[name]
            stream.act(Act.FINISH)
            stream.fin_due = True
            self._queue(stream)

    def read(self, name: int, size_bytes: int) -> None:
        """Record that the application has read `size_bytes`."""
        if (stream := self._streams.get(name)) is not None:
            if credit := stream.read(size_bytes, self._limits.window_max_bytes):
                self._say(FrameKind.WINDOW_UPDATE, 0, name, credit)
            self._settle(stream)

    def stop_reading(self, name: int) -> None:
        """Drop unread data and all data that still arrives."""
        if (stream := self._streams.get(name)) is not None:
            stream.stop_reading()
            self._settle(stream)

    def reset(self, name: int) -> None:
        """Reset a stream in both directions."""
        if (stream := self._streams.get(name)) is not None:
            self._say(FrameKind.WINDOW_UPDATE, Flag.RST, name, 0)
            self._drop(stream)

    def leave(self) -> None:
        """Send GO_AWAY: no more streams are opened or accepted."""
        if not self._left:
            self._left = True
            self._say(FrameKind.GO_AWAY, 0, 0, 0)

    def tick(self) -> None:
        """Advance the clock by one interval."""
        self._allowance = self._limits.frames_per_tick * _FRAME_COST
        for stream in list(self._streams.values()):
            if stream.unwanted and stream.state is StreamState.FINISHED:
                stream.ticks_left -= 1
                if not stream.ticks_left:
                    self.reset(stream.name)
        self._silent_ticks = 0 if self._heard else self._silent_ticks + 1
        self._heard = False
        if self._silent_ticks == 2:
            raise PeerSilent("It did not even answer a ping.")
        if self._silent_ticks == 1:
            self._pings = (self._pings + 1) & LENGTH_MAX
            self._say(FrameKind.PING, Flag.SYN, 0, self._pings)

    def gone(self) -> list[int]:
        """Return the streams that have ended since the last call, without those whose names are in use again."""
        gone, self._gone = self._gone, []
        return [name for name in gone if name not in self._streams]

    def end(self) -> None:
        """Release all memory; the connection has ended."""
        for stream in list(self._streams.values()):
            self._drop(stream)

    # Output.

    @property
    def has_output(self) -> bool:
        return bool(self._control) or bool(self._turns)

    def output(self, size_max: int) -> list[bytes]:
        """Return the frames to send now, as plaintexts of at most `FRAME_MAX_BYTES`; about `size_max` bytes in all."""
        messages = [bytes(self._control[at : at + FRAME_MAX_BYTES]) for at in _steps(self._control)]
        self._control.clear()
        size = 0
        while self._turns and size < size_max:
            messages.append(self._next_frame(self._turns.popleft(), min(size_max, BODY_MAX_BYTES)))
            size += len(messages[-1])
        return messages

    def written(self) -> list[int]:
        """Return the streams whose data was sent completely since the last call."""
        done, self._written = self._written, []
        return done

    def _next_frame(self, stream: Stream, body_max: int) -> bytes:
        stream.queued = False
        if not stream.unsent:
            stream.fin_due = False
            self._settle(stream)
            return pack(FrameKind.WINDOW_UPDATE, Flag.FIN, stream.name, 0)
        body = stream.take_unsent(body_max, min(body_max + CRUMB_BYTES, BODY_MAX_BYTES))
        self._allowance += len(body)
        if not stream.unsent:
            self._written.append(stream.name)
        self._queue(stream)
        return b"".join((pack(FrameKind.DATA, 0, stream.name, len(body)), body))

    def _queue(self, stream: Stream) -> None:
        """Queue a stream for its next turn, if it has output."""
        if not stream.queued and stream.has_output:
            stream.queued = True
            self._turns.append(stream)

    def _unqueue(self, stream: Stream) -> None:
        if stream.queued:
            stream.queued = False
            self._turns.remove(stream)

    def _say(self, kind: FrameKind, flags: int, name: int, length: int) -> None:
        self._control += pack(kind, flags, name, length)

    # Input.

    def receive(self, data: bytes) -> list[Event]:
        """Process a message from the peer; raises `MuxViolation`, after which only `end` may be called."""
        self._heard, has_header = True, False
        events: list[Event] = []
        for item in self._reader.feed(data):
            if isinstance(item, FrameHeader):
                has_header = True
                self._charge()
                _ON_FRAME[item.kind](self, item, events)
            else:
                self._on_body(item, events)
        if not has_header:
            self._charge()
        return events

    def _charge(self) -> None:
        self._allowance -= _FRAME_COST
        if self._allowance < 0:
            raise FrameFlood("The peer sends too many frames without data.")
        if len(self._control) > self._limits.control_max_bytes:
            raise FrameFlood("The peer requests answers and does not read them.")

    def _on_data(self, header: FrameHeader, events: list[Event]) -> None:
        stream = self._stream_of(header, events)
        if stream is not None:
            stream.charge(header.length)
        else:
            self._forfeited -= header.length
            if self._forfeited < 0:
                raise WindowExceeded(f"The peer sends to stream {header.stream} after its end.")
        self._body = (header.stream, header.flags, header.length)
        if not header.length:
            self._on_flags(header.stream, header.flags, events)

    def _on_body(self, piece: memoryview, events: list[Event]) -> None:
        name, flags, missing = self._body
        missing -= len(piece)
        self._body = (name, flags, missing)
        stream = self._streams.get(name)
        if stream is not None:
            self._allowance += len(piece)
            if stream.arrived(len(piece)):
                events.append(Arrived(name, piece))
        if not missing:
            self._on_flags(name, flags, events)

    def _on_window_update(self, header: FrameHeader, events: list[Event]) -> None:
        stream = self._stream_of(header, events)
        if stream is not None:
            stream.credited(header.length)
            self._queue(stream)
        self._on_flags(header.stream, header.flags, events)

    def _on_ping(self, header: FrameHeader, _events: list[Event]) -> None:
        if header.stream:
            raise MuxViolation("PING must not name a stream.")
        if header.flags & Flag.SYN:
            self._say(FrameKind.PING, Flag.ACK, 0, header.length)

    def _on_go_away(self, header: FrameHeader, events: list[Event]) -> None:
        if header.stream:
            raise MuxViolation("GO_AWAY must not name a stream.")
        self._peer_left = True
        events.append(Left(header.length))

    def _stream_of(self, header: FrameHeader, events: list[Event]) -> Stream | None:
        """Return the stream of a frame, created on SYN; None if it has ended or was refused."""
        name, flags = header.stream, header.flags
        theirs = name % 2 == self._peer_names
        if flags & Flag.SYN and theirs and name:
            self._admit(name, events)
        elif flags & Flag.SYN or not 0 < name <= (self._peer_name_max if theirs else self._next_name - 2):
            raise MuxViolation(f"Stream {name} was never opened, or by the wrong side.")
        stream = self._streams.get(name)
        if stream is not None and stream.ours and flags & Flag.ACK:
            stream.accepted = True
        return stream

    def _admit(self, name: int, events: list[Event]) -> None:
        if name in self._streams:
            raise MuxViolation(f"Stream {name} is opened twice.")
        self._peer_name_max = max(self._peer_name_max, name)
        if self._left or self._is_full(ours=False) or not self.budget.reserve(INITIAL_WINDOW_BYTES):
            self._forfeit(INITIAL_WINDOW_BYTES)
            self._say(FrameKind.WINDOW_UPDATE, Flag.RST, name, 0)
            return
        self._streams[name] = Stream(name, ours=False, budget=self.budget)
        events.append(Opened(name))

    def _is_full(self, *, ours: bool) -> bool:
        backlog = sum(1 for stream in self._streams.values() if stream.ours is ours and not stream.accepted)
        return len(self) >= self._limits.streams or backlog >= self._limits.backlog

    def _on_flags(self, name: int, flags: int, events: list[Event]) -> None:
        """Apply FIN and RST, after the body of their frame."""
        if not flags & (Flag.FIN | Flag.RST) or (stream := self._streams.get(name)) is None:
            return
        if flags & Flag.RST:
            self._drop(stream)
            events.append(Reset(name))
        else:
            stream.act(Act.END)
            events.append(Ended(name))
            self._settle(stream)

    # End of streams.

    def _settle(self, stream: Stream) -> None:
        """Forget a stream that has ended."""
        if stream.is_over:
            self._drop(stream)

    def _drop(self, stream: Stream) -> None:
        """Forget a stream at once; data already sent to it may still arrive."""
        del self._streams[stream.name]
        stream.free()
        self._unqueue(stream)
        self._gone.append(stream.name)
        if stream.readable:
            self._forfeit(stream.allowed)

    def _forfeit(self, size_bytes: int) -> None:
        self._forfeited = min(self._forfeited + size_bytes, LENGTH_MAX)


def _steps(data: bytearray) -> range:
    return range(0, len(data), FRAME_MAX_BYTES)


_ON_FRAME: dict[int, Callable[[YamuxMachine, FrameHeader, list[Event]], None]] = {
    FrameKind.DATA: YamuxMachine._on_data,
    FrameKind.WINDOW_UPDATE: YamuxMachine._on_window_update,
    FrameKind.PING: YamuxMachine._on_ping,
    FrameKind.GO_AWAY: YamuxMachine._on_go_away,
}
