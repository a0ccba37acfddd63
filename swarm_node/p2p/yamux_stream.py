"""One Yamux stream, and the books that are kept of it: which directions are open, and who owes whom how many bytes.

- `TRANSITIONS` is the whole life of a stream; what is not listed is a violation of whoever acts.
- A window is memory, taken from a `ReceiveBudget` before it is promised: bytes still allowed, bytes unread and bytes
  read but not credited yet always add up to it.
- A window doubles when the application has read half of it, as far as the budget goes; credit returns at the same
  moment. So a peer gains room only by being read.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum

from protocol import limits
from swarm_node.p2p.yamux_frames import INITIAL_WINDOW_BYTES, LENGTH_MAX, MuxViolation, WindowExceeded


class StreamState(Enum):
    """Which directions of a stream are open."""

    OPEN = "open"
    FINISHED = "finished"
    """We have nothing more to send."""
    ENDED = "ended"
    """The peer has nothing more to send."""
    CLOSED = "closed"


class Act(Enum):
    """What changes the state of a stream; a reset does not, it removes the stream."""

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
    """What one connection may cost; tests shrink it."""

    window_open_bytes: int = limits.STREAM_WINDOW_OPEN_BYTES
    window_max_bytes: int = limits.STREAM_WINDOW_MAX_BYTES
    receive_max_bytes: int = limits.CONNECTION_RECEIVE_MAX_BYTES
    streams: int = limits.CONNECTION_STREAMS_MAX
    backlog: int = limits.CONNECTION_BACKLOG_MAX
    frames_per_tick: int = limits.CONNECTION_FRAMES_PER_TICK
    control_max_bytes: int = limits.CONNECTION_CONTROL_MAX_BYTES


class ReceiveBudget:
    """Bytes that peers may make us hold; a connection's budget is taken from its host's."""

    def __init__(self, size_bytes: int, parent: "ReceiveBudget | None" = None) -> None:
        self.left, self._parent = size_bytes, parent

    def reserve(self, size_bytes: int) -> bool:
        """Whether so much is granted; all or nothing."""
        if size_bytes > self.left or (self._parent is not None and not self._parent.reserve(size_bytes)):
            return False
        self.left -= size_bytes
        return True

    def give_back(self, size_bytes: int) -> None:
        """Return what was taken."""
        self.left += size_bytes
        if self._parent is not None:
            self._parent.give_back(size_bytes)


class Stream:
    """The books of one stream; its first window is taken already."""

    def __init__(self, name: int, *, ours: bool, budget: ReceiveBudget) -> None:
        self.name, self.ours, self._budget = name, ours, budget
        self.accepted = False
        """By whoever did not open it."""
        self.state = StreamState.OPEN
        self.window = self.allowed = INITIAL_WINDOW_BYTES
        self.unread = self.uncredited = 0
        self.unwanted = False
        """The application does not read any more."""
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
        """Whether a frame can go out: data within the window, or FIN after all data."""
        return bool(self.may_send) if self.unsent else self.fin_due

    @property
    def is_over(self) -> bool:
        """Closed, sent and read: nothing is left to remember."""
        return self.state is StreamState.CLOSED and not (self.unsent or self.fin_due or self.unread)

    def act(self, act: Act) -> None:
        """Follow the table."""
        following = TRANSITIONS.get((self.state, act))
        if following is None:
            raise MuxViolation(f"Stream {self.name} is {self.state.value}, and then {act.value} it.")
        self.state = following

    def charge(self, size_bytes: int) -> None:
        """Count what a header announces against what was allowed."""
        if size_bytes and not self.readable:
            raise MuxViolation(f"The peer sends data on stream {self.name} after its end.")
        self.allowed -= size_bytes
        if self.allowed < 0:
            raise WindowExceeded(f"The peer exceeds the window of stream {self.name} by {-self.allowed} bytes.")

    def arrived(self, size_bytes: int) -> bool:
        """Book what has come in; whether anybody wants it."""
        if self.unwanted:
            self.uncredited += size_bytes
        else:
            self.unread += size_bytes
        return not self.unwanted

    def read(self, size_bytes: int, window_max: int) -> int:
        """Book what the application has taken; the credit to return for it now."""
        self.unread -= size_bytes
        self.uncredited += size_bytes
        if not self.readable or self.unwanted or 2 * self.uncredited < self.window:
            return 0
        credit, self.uncredited = self.uncredited, 0
        self.allowed += credit
        return credit + self.widen(min(2 * self.window, window_max))

    def stop_reading(self) -> None:
        """Drop what is unread, and whatever still comes; it earns no more credit."""
        self.unwanted = True
        self.uncredited += self.unread
        self.unread = 0

    def widen(self, window: int) -> int:
        """Raise the window if the budget allows it; the bytes to grant in addition."""
        more = window - self.window
        if more <= 0 or not self._budget.reserve(more):
            return 0
        self.window += more
        self.allowed += more
        return more

    def credited(self, size_bytes: int) -> None:
        """Book what the peer allows in addition."""
        self.may_send += size_bytes
        if self.may_send > LENGTH_MAX:
            raise MuxViolation(f"The window of stream {self.name} overflows.")

    def take_unsent(self, size_max: int, last_max: int) -> memoryview:
        """The next bytes to send, within the window; the last ones of what is written may be some more."""
        data = self.unsent[0]
        body = data[: min(len(data) if len(data) <= last_max else size_max, self.may_send)]
        self.may_send -= len(body)
        if len(body) == len(data):
            self.unsent.popleft()
        else:
            self.unsent[0] = data[len(body) :]
        return body

    def free(self) -> None:
        """Give its memory back."""
        self._budget.give_back(self.window)
