"""State of one Yamux stream: the open directions, and the byte counts of both windows.

- `TRANSITIONS` lists every transition of a stream; an unlisted one is a violation by the acting side.
- A window is memory, reserved from a `ReceiveBudget` before it is advertised: bytes still allowed, bytes unread and
  bytes read but not credited yet always add up to it.
- A window doubles when the application has read half of it, as far as the budget allows; credit is returned at the same
  moment. So a peer's window grows only while its data is read.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum

from protocol import limits
from swarm_node.p2p.yamux_frames import INITIAL_WINDOW_BYTES, LENGTH_MAX, MuxViolation, WindowExceeded


class StreamState(Enum):
    """State of a stream: the directions that are open."""

    OPEN = "open"
    FINISHED = "finished"
    """The local side sends nothing more."""
    ENDED = "ended"
    """The peer sends nothing more."""
    CLOSED = "closed"


class Act(Enum):
    """Event that changes the state of a stream; a reset is none, it removes the stream."""

    FINISH = "we finish"
    END = "the peer ends"


TRANSITIONS = {
    (StreamState.OPEN, Act.FINISH): StreamState.FINISHED,
    (StreamState.OPEN, Act.END): StreamState.ENDED,
    (StreamState.FINISHED, Act.END): StreamState.CLOSED,
    (StreamState.ENDED, Act.FINISH): StreamState.CLOSED,
}


@dataclass(frozen=True)
class MuxLimits:
    """Limits of one connection; tests shrink them."""

    window_open_bytes: int = limits.STREAM_WINDOW_OPEN_BYTES
    window_max_bytes: int = limits.STREAM_WINDOW_MAX_BYTES
    receive_max_bytes: int = limits.CONNECTION_RECEIVE_MAX_BYTES
    streams: int = limits.CONNECTION_STREAMS_MAX
    backlog: int = limits.CONNECTION_BACKLOG_MAX
    frames_per_tick: int = limits.CONNECTION_FRAMES_PER_TICK
    control_max_bytes: int = limits.CONNECTION_CONTROL_MAX_BYTES


class ReceiveBudget:
    """Bytes that peers may make us hold; a connection's budget is part of its host's."""

    def __init__(self, size_bytes: int, parent: "ReceiveBudget | None" = None) -> None:
        self.left, self._parent = size_bytes, parent

    def reserve(self, size_bytes: int) -> bool:
        """Reserve `size_bytes`, all or nothing; return True on success."""
        if size_bytes > self.left or (self._parent is not None and not self._parent.reserve(size_bytes)):
            return False
        self.left -= size_bytes
        return True

    def give_back(self, size_bytes: int) -> None:
        """Release reserved bytes."""
        self.left += size_bytes
        if self._parent is not None:
            self._parent.give_back(size_bytes)


class Stream:
    """State and byte counts of one stream; its first window is already reserved."""

    def __init__(self, name: int, *, ours: bool, budget: ReceiveBudget) -> None:
        self.name, self.ours, self._budget = name, ours, budget
        self.accepted = False
        """The side that did not open the stream has accepted it."""
        self.state = StreamState.OPEN
        self.window = self.allowed = INITIAL_WINDOW_BYTES
        self.unread = self.uncredited = 0
        self.unwanted = False
        """The application has stopped reading."""
        self.ticks_left = limits.STREAM_LINGER_TICKS
        self.may_send = INITIAL_WINDOW_BYTES
        self.unsent: deque[memoryview] = deque()
        self.fin_due = False
        self.queued = False

    @property
    def writable(self) -> bool:
        return self.state in (StreamState.OPEN, StreamState.ENDED)

    @property
    def readable(self) -> bool:
        return self.state in (StreamState.OPEN, StreamState.FINISHED)

    @property
    def has_output(self) -> bool:
        """True if a frame can be sent: data within the window, or FIN after all data."""
        return bool(self.may_send) if self.unsent else self.fin_due

    @property
    def is_over(self) -> bool:
        """True once the stream is closed, and all data is sent and read."""
        return self.state is StreamState.CLOSED and not (self.unsent or self.fin_due or self.unread)

    def act(self, act: Act) -> None:
        """Apply a transition of the table."""
        following = TRANSITIONS.get((self.state, act))
        if following is None:
            raise MuxViolation(f"Stream {self.name} is {self.state.value}, and then {act.value} it.")
        self.state = following

    def charge(self, size_bytes: int) -> None:
        """Subtract the bytes that a header announces from the allowed bytes."""
        if size_bytes and not self.readable:
            raise MuxViolation(f"The peer sends data on stream {self.name} after its end.")
        self.allowed -= size_bytes
        if self.allowed < 0:
            raise WindowExceeded(f"The peer exceeds the window of stream {self.name} by {-self.allowed} bytes.")

    def arrived(self, size_bytes: int) -> bool:
        """Record received bytes; return True if the application still reads."""
        if self.unwanted:
            self.uncredited += size_bytes
        else:
            self.unread += size_bytes
        return not self.unwanted

    def read(self, size_bytes: int, window_max: int) -> int:
        """Record bytes that the application has read; return the credit to send now."""
        self.unread -= size_bytes
        self.uncredited += size_bytes
        if not self.readable or self.unwanted or 2 * self.uncredited < self.window:
            return 0
        credit, self.uncredited = self.uncredited, 0
        self.allowed += credit
        return credit + self.widen(min(2 * self.window, window_max))

    def stop_reading(self) -> None:
        """Drop unread data, and all data that still arrives; the peer gets no more credit."""
        self.unwanted = True
        self.uncredited += self.unread
        self.unread = 0

    def widen(self, window: int) -> int:
        """Raise the window if the budget allows it; return the additional bytes to grant."""
        more = window - self.window
        if more <= 0 or not self._budget.reserve(more):
            return 0
        self.window += more
        self.allowed += more
        return more

    def credited(self, size_bytes: int) -> None:
        """Record additional bytes that the peer allows."""
        self.may_send += size_bytes
        if self.may_send > LENGTH_MAX:
            raise MuxViolation(f"The window of stream {self.name} overflows.")

    def take_unsent(self, size_max: int, last_max: int) -> memoryview:
        """Return the next bytes to send, within the window; up to `last_max` if that completes the data."""
        data = self.unsent[0]
        body = data[: min(len(data) if len(data) <= last_max else size_max, self.may_send)]
        self.may_send -= len(body)
        if len(body) == len(data):
            self.unsent.popleft()
        else:
            self.unsent[0] = data[len(body) :]
        return body

    def free(self) -> None:
        """Release the memory of the window."""
        self._budget.give_back(self.window)
