"""`/echo-swarm/chunks/1`: how verified chunks of a policy travel between two nodes over one stream.

Participants: the *requester* opens the stream and asks; the *responder* answers from its chunk store. A pair that
feeds each other opens one stream in each direction. Who the other side is, and that nobody reads or changes the bytes
on the way, is the secure channel's business (libp2p with Noise).

Goals: many chunks in flight on one long-lived stream; a bound on what the other side can make us buffer, known before
we buffer it; no request without an answer; every departure from these rules has a name and an owner.
Non-goals: truth (a chunk proves itself by its hash, whoever sent it), discovery, fairness, and time (deadlines belong
to the caller, who owns the clock).

Frame: type u8, body length u32 big-endian, body. Chunk names travel as their 32 raw bytes.

    2 WANT    requester → responder   name                 asks for one chunk
    3 CHUNK   responder → requester   name, 1…4 MiB bytes  answers a WANT
    4 REJECT  responder → requester   name, reason u8      answers a WANT: 1 absent, 2 busy, 3 malformed
    6 BYE     both                    reason u8            last frame: 1 done, 2 busy, 3 idle, 4 fault

Types 1 and 5 are kept for HAVE and CANCEL.

Rules:

- Each WANT gets exactly one CHUNK or REJECT, in any order; at most `EXCHANGE_WANTS_MAX` may be unanswered.
- A name is not asked for again while its first WANT is unanswered.
- The end of the stream means nothing by itself: what counts is a CHUNK whose hash is right.

Failures, all faults of the other side, which end the stream: an unknown type or a body that does not fit its type
(`MalformedFrame`); a length beyond the type's limit (`FrameTooLarge`); an answer nobody asked for, a second answer, a
chunk of another size than the manifest says (`UnaskedAnswer`); a WANT too many or twice (`WantRefused`).
"""

import struct
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

from protocol import limits
from protocol.errors import PeerFault
from protocol.ids import ChunkId

PROTOCOL_ID = "/echo-swarm/chunks/1"

_HEADER = struct.Struct(">BI")
_NAME_BYTES = 32


class MalformedFrame(PeerFault):
    """A frame of no known type, or whose body does not fit its type."""

    code = "malformed_frame"


class FrameTooLarge(PeerFault):
    """A frame announces more bytes than its type may have."""

    code = "frame_too_large"


class UnaskedAnswer(PeerFault):
    """A CHUNK or REJECT that answers no open WANT, or answers it with another size."""

    code = "unasked_answer"


class WantRefused(PeerFault):
    """A WANT beyond the window, or for a name that is already being answered."""

    code = "want_refused"


class Reason(IntEnum):
    """Why a WANT gets no chunk."""

    ABSENT = 1
    BUSY = 2
    MALFORMED = 3


class Farewell(IntEnum):
    """Why one side ends the stream."""

    DONE = 1
    BUSY = 2
    IDLE = 3
    FAULT = 4


@dataclass(frozen=True)
class Want:
    """Ask for a chunk."""

    type: ClassVar[int] = 2
    chunk: ChunkId


@dataclass(frozen=True)
class Chunk:
    """The bytes that were asked for; not yet verified."""

    type: ClassVar[int] = 3
    chunk: ChunkId
    data: bytes


@dataclass(frozen=True)
class Reject:
    """No bytes, and why."""

    type: ClassVar[int] = 4
    chunk: ChunkId
    reason: Reason


@dataclass(frozen=True)
class Bye:
    """The last frame of a side."""

    type: ClassVar[int] = 6
    reason: Farewell


Message = Want | Chunk | Reject | Bye

_BODY_BYTES: dict[int, tuple[int, int]] = {
    Want.type: (_NAME_BYTES, _NAME_BYTES),
    Chunk.type: (_NAME_BYTES + 1, _NAME_BYTES + limits.CHUNK_MAX_BYTES),
    Reject.type: (_NAME_BYTES + 1, _NAME_BYTES + 1),
    Bye.type: (1, 1),
}
"""Frame type → smallest and largest body."""


def encode(message: Message) -> bytes:
    """The frame of a message."""
    name = b"" if isinstance(message, Bye) else bytes.fromhex(message.chunk)
    rest = b""
    if isinstance(message, Chunk):
        rest = message.data
    elif isinstance(message, Bye | Reject):
        rest = bytes([message.reason])
    smallest, largest = _BODY_BYTES[message.type]
    length = len(name) + len(rest)
    if not smallest <= length <= largest:
        raise ValueError(f"a {type(message).__name__} cannot have a body of {length} bytes")
    return b"".join((_HEADER.pack(message.type, length), name, rest))


class FrameReader:
    """Bytes in, messages out; holds at most one unfinished frame, whose size was checked at its header.

    `chunk_max_bytes` lowers the bound on CHUNK frames to what the caller expects (a manifest's chunk size; 0 for a
    responder, which expects none).
    """

    def __init__(self, chunk_max_bytes: int = limits.CHUNK_MAX_BYTES) -> None:
        self._chunk_body_max_bytes = _NAME_BYTES + min(chunk_max_bytes, limits.CHUNK_MAX_BYTES)
        self._buffer = bytearray()
        self._frame_bytes = _HEADER.size
        self._has_header = False

    @property
    def buffered_bytes(self) -> int:
        """Bytes of a frame that has begun and is not complete; 0 at a frame boundary."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[Message]:
        """The messages these bytes complete; after an error the stream is lost and the reader must not be used."""
        messages: list[Message] = []
        rest = memoryview(data)
        while rest:
            taken = rest[: self._frame_bytes - len(self._buffer)]
            self._buffer += taken
            rest = rest[len(taken) :]
            if len(self._buffer) == self._frame_bytes:
                if not self._has_header:
                    self._frame_bytes += self._body_bytes()
                    self._has_header = True
                else:
                    messages.append(_decode(self._buffer))
                    self._buffer = bytearray()
                    self._frame_bytes = _HEADER.size
                    self._has_header = False
        return messages

    def _body_bytes(self) -> int:
        """The announced body length, refused before a byte of the body is kept."""
        kind, length = _HEADER.unpack(self._buffer)
        if kind not in _BODY_BYTES:
            raise MalformedFrame(f"Frame type {kind} is not part of {PROTOCOL_ID}.")
        smallest, largest = _BODY_BYTES[kind]
        if kind == Chunk.type:
            largest = self._chunk_body_max_bytes
        if length > largest:
            raise FrameTooLarge(f"A frame of type {kind} announces {length} bytes; at most {largest} are read here.")
        if length < smallest:
            raise MalformedFrame(f"A frame of type {kind} has {length} bytes; at least {smallest} are needed.")
        assert isinstance(length, int)
        return length


def _decode(frame: bytearray) -> Message:
    """A complete frame whose type and length are already checked."""
    kind = frame[0]
    if kind == Bye.type:
        if frame[-1] not in tuple(Farewell):
            raise MalformedFrame(f"BYE reason {frame[-1]} is not part of {PROTOCOL_ID}.")
        return Bye(Farewell(frame[-1]))
    name_end = _HEADER.size + _NAME_BYTES
    chunk = ChunkId(frame[_HEADER.size : name_end].hex())
    if kind == Want.type:
        return Want(chunk)
    if kind == Chunk.type:
        return Chunk(chunk, bytes(memoryview(frame)[name_end:]))
    if frame[-1] not in tuple(Reason):
        raise MalformedFrame(f"REJECT reason {frame[-1]} is not part of {PROTOCOL_ID}.")
    return Reject(chunk, Reason(frame[-1]))


class Requester:
    """What one requester has asked for on a stream and not yet been told."""

    def __init__(self) -> None:
        self._sizes: dict[ChunkId, int] = {}

    @property
    def unanswered(self) -> int:
        return len(self._sizes)

    def want(self, chunk: ChunkId, size_bytes: int) -> Want:
        """Ask for a chunk of a known size; asking twice or beyond the window is this side's own bug."""
        if chunk in self._sizes or len(self._sizes) >= limits.EXCHANGE_WANTS_MAX:
            raise ValueError("the chunk is already asked for, or the window is full")
        self._sizes[chunk] = size_bytes
        return Want(chunk)

    def receive(self, message: Message) -> Chunk | Reject | Bye:
        """Match one message with its WANT."""
        if isinstance(message, Bye):
            return message
        if isinstance(message, Want):
            raise UnaskedAnswer("The responder asks for a chunk on the requester's stream.")
        if message.chunk not in self._sizes:
            raise UnaskedAnswer(f"Nobody asked for chunk {message.chunk[:12]}….")
        size_bytes = self._sizes.pop(message.chunk)
        if isinstance(message, Chunk) and len(message.data) != size_bytes:
            raise UnaskedAnswer(f"Chunk {message.chunk[:12]}… has {size_bytes} bytes, {len(message.data)} came.")
        return message


class Responder:
    """What one responder still has to answer on a stream."""

    def __init__(self) -> None:
        self._waiting: deque[ChunkId] = deque()
        self.ended = False

    def receive(self, message: Message) -> None:
        """Note a WANT, or that the requester has left."""
        if isinstance(message, Bye):
            self.ended = True
        elif not isinstance(message, Want):
            raise UnaskedAnswer("The requester sends answers on its own stream.")
        elif message.chunk in self._waiting:
            raise WantRefused(f"Chunk {message.chunk[:12]}… is asked for twice.")
        elif len(self._waiting) >= limits.EXCHANGE_WANTS_MAX:
            raise WantRefused(f"More than {limits.EXCHANGE_WANTS_MAX} WANTs are unanswered.")
        else:
            self._waiting.append(message.chunk)

    def next(self) -> ChunkId | None:
        """The oldest unanswered name, which the caller now answers; None when there is none or nobody listens."""
        return self._waiting.popleft() if self._waiting and not self.ended else None
