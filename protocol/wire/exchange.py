"""`/echo-swarm/chunks/1`: how verified chunks of a policy travel between two nodes over one stream.

Participants: the *requester* opens the stream and asks; the *responder* answers from its chunk store. Two nodes that
feed each other open one stream in each direction. The secure channel (libp2p with Noise) authenticates the other side
and protects the bytes on the way.

Goals: many chunks in flight on one long-lived stream; a chunk travels on the moment it has arrived; a bound on what the
other side can make us buffer, known before we buffer it; no request without an answer; every violation of these rules
has a name and a side at fault.
Non-goals: integrity (the hash of a chunk proves it, whoever sent it), discovery, fairness (but for one flag in a WANT),
and time (deadlines belong to the caller, who has the clock).

Frame: type u8, body length u32 big-endian, body. Chunk names travel as their 32 raw bytes.

    1 HAVE    responder → requester   1…64 names           it could send these at once; a hint, never a promise
    2 WANT    requester → responder   name, behind u8      asks for one chunk; 1: the requester is behind others
    3 CHUNK   responder → requester   name, 1…4 MiB bytes  answers a WANT
    4 REJECT  responder → requester   name, reason u8      answers a WANT: 1 absent, 2 busy, 3 cancelled
    5 CANCEL  requester → responder   name                 the chunk came from elsewhere; the WANT still gets its answer
    6 BYE     both                    reason u8            last frame: 1 done, 2 busy, 3 idle, 4 fault

What each side may send, and until when; what is not listed is a fault of the sender. The two sides are independent:

    responder  open   HAVE    → open
    responder  open   CHUNK   → open
    responder  open   REJECT  → open
    responder  open   BYE     → ended
    requester  open   WANT    → open
    requester  open   CANCEL  → open
    requester  open   BYE     → ended

The standing of a name on a stream, the same for both sides; what is not listed is a fault of the sender:

    closed     WANT    → open
    open       CHUNK   → closed
    open       REJECT  → closed
    open       CANCEL  → cancelled
    cancelled  CHUNK   → closed
    cancelled  REJECT  → closed
    closed     CANCEL  → closed      it crossed the answer on the way

Rules:

- Each WANT gets exactly one CHUNK or REJECT, in any order; at most `EXCHANGE_WANTS_MAX` may be unanswered.
- A responder that is itself about to receive the chunk keeps the WANT and answers when the chunk arrives: so a version
  flows through a chain of nodes chunk by chunk. A responder that neither has nor expects the chunk rejects it as
  absent, at once or after the short time in which it may learn of a new version.
- A CANCEL that arrives in time is answered by REJECT, reason cancelled; nothing else is. There are no more CANCELs than
  WANTs: one that crosses an answer is ignored, and one without a WANT is a fault.
- A requester that is behind other nodes says so with each WANT. A responder may serve it before others; nobody can
  check the claim, and only the order of answers depends on it.
- HAVE names chunks that arrived after the stream was opened, or were stored before; it may leave out any.
- The end of the stream means nothing by itself: only a CHUNK with the right hash counts.

Failures, all faults of the other side, which end the stream: an unknown type or a body that does not fit its type
(`MalformedFrame`); a length beyond the type's limit (`FrameTooLarge`); a request by the responder or an answer by the
requester (`WrongRole`); anything after BYE (`SpokeAfterBye`); an answer without a request, a second answer, reason
cancelled without a CANCEL, a chunk of another size than the manifest says (`UnaskedAnswer`); more names in HAVE than
two versions have (`TooMuchNews`); a WANT beyond the window or repeated, or cancelled twice, or a CANCEL without a WANT
(`WantRefused`).
"""

from collections.abc import Collection
from enum import Enum
from typing import TypeVar

from protocol import limits
from protocol.errors import PeerFault
from protocol.ids import ChunkId
from protocol.wire.frames import Bye, Cancel, Chunk, Have, Message, Reason, Reject, Want

PROTOCOL_ID = "/echo-swarm/chunks/1"


class UnaskedAnswer(PeerFault):
    """A CHUNK or REJECT without an open WANT, or a CHUNK of the wrong size."""

    code = "unasked_answer"


class WantRefused(PeerFault):
    """A WANT beyond the window, or for a name that already has an open WANT; a CANCEL without a WANT."""

    code = "want_refused"


class WrongRole(PeerFault):
    """A request from the responder, or an answer from the requester."""

    code = "wrong_role"


class SpokeAfterBye(PeerFault):
    """A frame after BYE, which is the last frame."""

    code = "spoke_after_bye"


class TooMuchNews(PeerFault):
    """More names in HAVE than two versions can have."""

    code = "too_much_news"


Answer = TypeVar("Answer", Chunk, Reject)


class Speech(Enum):
    """The state of one side: it may still send frames, or it has sent BYE."""

    OPEN = "open"
    ENDED = "ended"


RESPONDER: dict[tuple[Speech, type[Message]], Speech] = {
    (Speech.OPEN, Have): Speech.OPEN,
    (Speech.OPEN, Chunk): Speech.OPEN,
    (Speech.OPEN, Reject): Speech.OPEN,
    (Speech.OPEN, Bye): Speech.ENDED,
}
REQUESTER: dict[tuple[Speech, type[Message]], Speech] = {
    (Speech.OPEN, Want): Speech.OPEN,
    (Speech.OPEN, Cancel): Speech.OPEN,
    (Speech.OPEN, Bye): Speech.ENDED,
}
"""The frames that each side may send, and the state after each."""


def _state_after(speech: Speech, message: Message, table: dict[tuple[Speech, type[Message]], Speech]) -> Speech:
    """Return the other side's state after this message."""
    after = table.get((speech, type(message)))
    if after is not None:
        return after
    kind = type(message).__name__.upper()
    if speech is Speech.ENDED:
        raise SpokeAfterBye(f"{kind} came after BYE.")
    raise WrongRole(f"The {'responder' if table is RESPONDER else 'requester'} must not send {kind}.")


class ChunkStanding(Enum):
    """The state of one name on one stream."""

    CLOSED = "closed"
    OPEN = "open"
    CANCELLED = "cancelled"


TRANSITIONS: dict[tuple[ChunkStanding, type[Want | Chunk | Reject | Cancel]], ChunkStanding] = {
    (ChunkStanding.CLOSED, Want): ChunkStanding.OPEN,
    (ChunkStanding.OPEN, Chunk): ChunkStanding.CLOSED,
    (ChunkStanding.OPEN, Reject): ChunkStanding.CLOSED,
    (ChunkStanding.OPEN, Cancel): ChunkStanding.CANCELLED,
    (ChunkStanding.CANCELLED, Chunk): ChunkStanding.CLOSED,
    (ChunkStanding.CANCELLED, Reject): ChunkStanding.CLOSED,
    (ChunkStanding.CLOSED, Cancel): ChunkStanding.CLOSED,
}


class _Standings:
    """The names that are not closed; a step that is not in the table, or a WANT beyond the window, is rejected."""

    def __init__(self) -> None:
        self._standing: dict[ChunkId, ChunkStanding] = {}

    def __len__(self) -> int:
        return len(self._standing)

    def of(self, chunk: ChunkId) -> ChunkStanding:
        return self._standing.get(chunk, ChunkStanding.CLOSED)

    def step(self, message: Want | Chunk | Reject | Cancel) -> bool:
        """Apply one step; return False if the rules forbid it."""
        after = TRANSITIONS.get((self.of(message.chunk), type(message)))
        if after is None or (after is ChunkStanding.OPEN and len(self) >= limits.EXCHANGE_WANTS_MAX):
            return False
        self._standing[message.chunk] = after
        if after is ChunkStanding.CLOSED:
            del self._standing[message.chunk]
        return True


class Requester:
    """The requesting side of one stream: its unanswered WANTs."""

    def __init__(self) -> None:
        self._names = _Standings()
        self._sizes: dict[ChunkId, int] = {}
        self._announced = 0
        self._speech = Speech.OPEN

    @property
    def unanswered(self) -> int:
        return len(self._names)

    def awaits(self, chunk: ChunkId) -> bool:
        """Return True if a CHUNK or REJECT of this name is due."""
        return chunk in self._sizes

    def require_awaited(self, chunk: ChunkId) -> None:
        """Raise `UnaskedAnswer` for a CHUNK whose name alone has arrived, if no answer of this name is due."""
        if not self.awaits(chunk):
            raise _unasked(chunk)

    def want(self, chunk: ChunkId, size_bytes: int, *, is_behind: bool = False) -> Want:
        """Request a chunk of a known size; a repeated request or one beyond the window is this side's own bug."""
        want = Want(chunk, is_behind)
        if not self._names.step(want):
            raise ValueError("the chunk is already asked for, or the window is full")
        self._sizes[chunk] = size_bytes
        return want

    def cancel(self, chunk: ChunkId) -> Cancel | None:
        """Cancel a WANT; return None if it is answered or cancelled already."""
        cancel = Cancel(chunk)
        return cancel if self._names.of(chunk) is ChunkStanding.OPEN and self._names.step(cancel) else None

    def receive(self, message: Message) -> Have | Chunk | Reject | Bye:
        """Match one message with its WANT."""
        self._speech = _state_after(self._speech, message, RESPONDER)
        assert not isinstance(message, Want | Cancel)
        if isinstance(message, Have):
            self._announced += len(message.chunks)
            if self._announced > limits.EXCHANGE_HAVE_TOTAL_MAX:
                raise TooMuchNews("The responder announced more chunks than two versions can have.")
        if isinstance(message, Have | Bye):
            return message
        taken_back = self._names.of(message.chunk) is ChunkStanding.CANCELLED
        if isinstance(message, Reject) and message.reason is Reason.CANCELLED and not taken_back:
            raise UnaskedAnswer(f"The WANT for chunk {message.chunk[:12]}… was not cancelled.")
        if not self._names.step(message):
            raise _unasked(message.chunk)
        size_bytes = self._sizes.pop(message.chunk)
        if isinstance(message, Chunk) and len(message.data) != size_bytes:
            raise UnaskedAnswer(f"Chunk {message.chunk[:12]}… has {size_bytes} bytes, but {len(message.data)} arrived.")
        return message


def _unasked(chunk: ChunkId) -> UnaskedAnswer:
    return UnaskedAnswer(f"Chunk {chunk[:12]}… was not requested.")


class Responder:
    """The answering side of one stream: the answers that it owes, the oldest first."""

    def __init__(self) -> None:
        self._names = _Standings()
        self._owed: dict[ChunkId, None] = {}
        self._crossing = 0
        """WANTs that were answered before any CANCEL: as many CANCELs may have crossed their answers."""
        self._speech = Speech.OPEN

    @property
    def ended(self) -> bool:
        """True once the requester has sent BYE."""
        return self._speech is Speech.ENDED

    @property
    def owed(self) -> Collection[ChunkId]:
        """Names that still need a CHUNK or REJECT."""
        return self._owed.keys()

    def receive(self, message: Message) -> Reject | None:
        """Record a WANT, a CANCEL or a BYE; return the answer to a CANCEL that arrived in time."""
        self._speech = _state_after(self._speech, message, REQUESTER)
        if isinstance(message, Want):
            if not self._names.step(message):
                raise WantRefused(f"Chunk {message.chunk[:12]}… was requested twice, or beyond the window.")
            self._owed[message.chunk] = None
        elif isinstance(message, Cancel):
            self._crossing -= self._names.of(message.chunk) is ChunkStanding.CLOSED
            if self._crossing < 0:
                raise WantRefused(f"Chunk {message.chunk[:12]}… was cancelled without a WANT.")
            if not self._names.step(message):
                raise WantRefused(f"The WANT for chunk {message.chunk[:12]}… was cancelled twice.")
            if message.chunk in self._owed:
                return self.reject(message.chunk, Reason.CANCELLED)
        return None

    def start_answer(self, chunk: ChunkId) -> None:
        """Begin to answer: the name is no longer owed, and a CANCEL is too late."""
        del self._owed[chunk]

    def chunk(self, chunk: ChunkId, data: bytes) -> Chunk:
        """Return the answer with the bytes."""
        return self._answer(Chunk(chunk, data))

    def reject(self, chunk: ChunkId, reason: Reason) -> Reject:
        """Return the answer without bytes."""
        return self._answer(Reject(chunk, reason))

    def _answer(self, answer: Answer) -> Answer:
        self._crossing += self._names.of(answer.chunk) is ChunkStanding.OPEN
        if not self._names.step(answer):
            raise ValueError("there is no WANT for this answer")
        self._owed.pop(answer.chunk, None)
        return answer
