"""`/echo-swarm/chunks/1`: how verified chunks of a policy travel between two nodes over one stream.

Participants: the *requester* opens the stream and asks; the *responder* answers from its chunk store. A pair that
feeds each other opens one stream in each direction. Who the other side is, and that nobody reads or changes the bytes
on the way, is the secure channel's business (libp2p with Noise).

Goals: many chunks in flight on one long-lived stream; a chunk travels on the moment it has arrived; a bound on what the
other side can make us buffer, known before we buffer it; no request without an answer; every departure from these rules
has a name and an owner.
Non-goals: truth (a chunk proves itself by its hash, whoever sent it), discovery, fairness (but for one word with a
WANT), and time (deadlines belong to the caller, who owns the clock).

Frame: type u8, body length u32 big-endian, body. Chunk names travel as their 32 raw bytes.

    1 HAVE    responder → requester   1…64 names           these would be answered at once; a hint, never a promise
    2 WANT    requester → responder   name, behind u8      asks for one chunk; 1: the requester is behind others
    3 CHUNK   responder → requester   name, 1…4 MiB bytes  answers a WANT
    4 REJECT  responder → requester   name, reason u8      answers a WANT: 1 absent, 2 busy, 3 cancelled
    5 CANCEL  requester → responder   name                 the chunk came from elsewhere; the WANT still gets its answer
    6 BYE     both                    reason u8            last frame: 1 done, 2 busy, 3 idle, 4 fault

What each side may say, and until when; what is not listed is a fault of the sender. The two ends are independent:

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
- A responder that is itself about to receive the chunk lets the WANT wait and answers when the chunk arrives: so a
  version flows through a chain of nodes chunk by chunk. One that neither has nor expects it rejects as absent, at once
  or after the moment that news of a version may take.
- A CANCEL that arrives in time is answered by REJECT, reason cancelled; nothing else is.
- Who is behind other nodes says so with each WANT. A responder may let others wait for it; nobody can check the word,
  and nothing but the order of answers depends on it.
- HAVE names chunks that arrived after the stream was opened, or were there already; it may leave out any.
- The end of the stream means nothing by itself: what counts is a CHUNK whose hash is right.

Failures, all faults of the other side, which end the stream: an unknown type or a body that does not fit its type
(`MalformedFrame`); a length beyond the type's limit (`FrameTooLarge`); a question by the responder or an answer by the
requester (`WrongRole`); anything after BYE (`SpokeAfterBye`); an answer nobody asked for, a second answer, reason
cancelled where nobody took anything back, a chunk of another size than the manifest says (`UnaskedAnswer`); names in
HAVE without end (`TooMuchNews`); a WANT too many or twice, or taken back twice (`WantRefused`).
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
    """A CHUNK or REJECT that answers no open WANT, or answers it with another size."""

    code = "unasked_answer"


class WantRefused(PeerFault):
    """A WANT beyond the window, or for a name that is already being answered."""

    code = "want_refused"


class WrongRole(PeerFault):
    """A question from who is to answer, or an answer from who is to ask."""

    code = "wrong_role"


class SpokeAfterBye(PeerFault):
    """A frame behind the one that is the last."""

    code = "spoke_after_bye"


class TooMuchNews(PeerFault):
    """HAVE names more chunks than there can be."""

    code = "too_much_news"


Answer = TypeVar("Answer", Chunk, Reject)


class Speech(Enum):
    """Whether a side has said its last word."""

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
"""What each may say."""


def _heard(speech: Speech, message: Message, table: dict[tuple[Speech, type[Message]], Speech]) -> Speech:
    """The other side's speech after this."""
    after = table.get((speech, type(message)))
    if after is not None:
        return after
    kind = type(message).__name__.upper()
    if speech is Speech.ENDED:
        raise SpokeAfterBye(f"{kind} came after BYE.")
    raise WrongRole(f"{kind} is not for the {'responder' if table is RESPONDER else 'requester'} to say.")


class ChunkStanding(Enum):
    """How one name stands on one stream."""

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
    """The names that are not closed; a step that the table does not list, or a WANT too many, is refused."""

    def __init__(self) -> None:
        self._standing: dict[ChunkId, ChunkStanding] = {}

    def __len__(self) -> int:
        return len(self._standing)

    def of(self, chunk: ChunkId) -> ChunkStanding:
        return self._standing.get(chunk, ChunkStanding.CLOSED)

    def step(self, message: Want | Chunk | Reject | Cancel) -> bool:
        """Take one step; False if it is against the rules."""
        after = TRANSITIONS.get((self.of(message.chunk), type(message)))
        if after is None or (after is ChunkStanding.OPEN and len(self) >= limits.EXCHANGE_WANTS_MAX):
            return False
        self._standing[message.chunk] = after
        if after is ChunkStanding.CLOSED:
            del self._standing[message.chunk]
        return True


class Requester:
    """The asking side of one stream: what it wants and has not been told."""

    def __init__(self) -> None:
        self._names = _Standings()
        self._sizes: dict[ChunkId, int] = {}
        self._told = 0
        self._speech = Speech.OPEN

    @property
    def unanswered(self) -> int:
        return len(self._names)

    def awaits(self, chunk: ChunkId) -> bool:
        """Whether a CHUNK or REJECT of this name is due."""
        return chunk in self._sizes

    def want(self, chunk: ChunkId, size_bytes: int, *, is_behind: bool = False) -> Want:
        """Ask for a chunk of a known size; asking twice or beyond the window is this side's own bug."""
        want = Want(chunk, is_behind)
        if not self._names.step(want):
            raise ValueError("the chunk is already asked for, or the window is full")
        self._sizes[chunk] = size_bytes
        return want

    def cancel(self, chunk: ChunkId) -> Cancel | None:
        """Take a WANT back; None if it is answered or taken back already."""
        cancel = Cancel(chunk)
        return cancel if self._names.of(chunk) is ChunkStanding.OPEN and self._names.step(cancel) else None

    def receive(self, message: Message) -> Have | Chunk | Reject | Bye:
        """Match one message with its WANT."""
        self._speech = _heard(self._speech, message, RESPONDER)
        assert not isinstance(message, Want | Cancel)
        if isinstance(message, Have):
            self._told += len(message.chunks)
            if self._told > limits.EXCHANGE_HAVE_TOTAL_MAX:
                raise TooMuchNews("The responder tells of more chunks than two versions can have.")
        if isinstance(message, Have | Bye):
            return message
        taken_back = self._names.of(message.chunk) is ChunkStanding.CANCELLED
        if isinstance(message, Reject) and message.reason is Reason.CANCELLED and not taken_back:
            raise UnaskedAnswer(f"Nobody took the WANT for chunk {message.chunk[:12]}… back.")
        if not self._names.step(message):
            raise UnaskedAnswer(f"Nobody asked for chunk {message.chunk[:12]}….")
        size_bytes = self._sizes.pop(message.chunk)
        if isinstance(message, Chunk) and len(message.data) != size_bytes:
            raise UnaskedAnswer(f"Chunk {message.chunk[:12]}… has {size_bytes} bytes, {len(message.data)} came.")
        return message


class Responder:
    """The answering side of one stream: what it owes, the oldest first."""

    def __init__(self) -> None:
        self._names = _Standings()
        self._owed: dict[ChunkId, None] = {}
        self._speech = Speech.OPEN

    @property
    def ended(self) -> bool:
        """The requester has left."""
        return self._speech is Speech.ENDED

    @property
    def owed(self) -> Collection[ChunkId]:
        """Names to be answered by CHUNK or REJECT."""
        return self._owed.keys()

    def receive(self, message: Message) -> Reject | None:
        """Note a WANT, a CANCEL, or that the requester has left; the answer to a CANCEL in time is returned."""
        self._speech = _heard(self._speech, message, REQUESTER)
        if isinstance(message, Want):
            if not self._names.step(message):
                raise WantRefused(f"Chunk {message.chunk[:12]}… is asked for twice, or beyond the window.")
            self._owed[message.chunk] = None
        elif isinstance(message, Cancel):
            if not self._names.step(message):
                raise WantRefused(f"The WANT for chunk {message.chunk[:12]}… is taken back twice.")
            if message.chunk in self._owed:
                return self.reject(message.chunk, Reason.CANCELLED)
        return None

    def start_answer(self, chunk: ChunkId) -> None:
        """Begin to answer: from here on the name is not owed, and a CANCEL comes too late."""
        del self._owed[chunk]

    def chunk(self, chunk: ChunkId, data: bytes) -> Chunk:
        """The answer with the bytes."""
        return self._answer(Chunk(chunk, data))

    def reject(self, chunk: ChunkId, reason: Reason) -> Reject:
        """The answer without."""
        return self._answer(Reject(chunk, reason))

    def _answer(self, answer: Answer) -> Answer:
        if not self._names.step(answer):
            raise ValueError("there is no WANT for this answer")
        self._owed.pop(answer.chunk, None)
        return answer
