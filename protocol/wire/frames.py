"""The frames of `/echo-swarm/chunks/1`: encoding and decoding; `protocol.wire.exchange` has their meaning.

- A frame is a type (u8), the length of the body (u32, big-endian), and the body; names are 32 raw bytes.
- A length is checked at the header, before any byte of the body is kept.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

from protocol import limits
from protocol.errors import PeerFault
from protocol.ids import ChunkId

_HEADER = struct.Struct(">BI")
_NAME_BYTES = 32


class MalformedFrame(PeerFault):
    """A frame of an unknown type, or a body that does not fit the type."""

    code = "malformed_frame"


class FrameTooLarge(PeerFault):
    """A frame announces more bytes than its type may have."""

    code = "frame_too_large"


class Reason(IntEnum):
    """Reasons to answer a WANT without a chunk."""

    ABSENT = 1
    BUSY = 2
    CANCELLED = 3


class Farewell(IntEnum):
    """Reasons to end the stream."""

    DONE = 1
    BUSY = 2
    IDLE = 3
    FAULT = 4


@dataclass(frozen=True)
class Have:
    """Chunks that the responder could send at once."""

    type: ClassVar[int] = 1
    chunks: tuple[ChunkId, ...]


@dataclass(frozen=True)
class Want:
    """A request for a chunk; `is_behind` means that the requester has less of the version than other nodes."""

    type: ClassVar[int] = 2
    chunk: ChunkId
    is_behind: bool = False


@dataclass(frozen=True)
class Chunk:
    """The requested bytes; not yet verified."""

    type: ClassVar[int] = 3
    chunk: ChunkId
    data: bytes


@dataclass(frozen=True)
class Reject:
    """An answer without bytes, and its reason."""

    type: ClassVar[int] = 4
    chunk: ChunkId
    reason: Reason


@dataclass(frozen=True)
class Cancel:
    """A note that the chunk is not needed any more."""

    type: ClassVar[int] = 5
    chunk: ChunkId


@dataclass(frozen=True)
class Bye:
    """The last frame of a side."""

    type: ClassVar[int] = 6
    reason: Farewell


Message = Have | Want | Chunk | Reject | Cancel | Bye

_BODY_BYTES: dict[int, tuple[int, int]] = {
    Have.type: (_NAME_BYTES, _NAME_BYTES * limits.EXCHANGE_HAVE_NAMES_MAX),
    Want.type: (_NAME_BYTES + 1, _NAME_BYTES + 1),
    Chunk.type: (_NAME_BYTES + 1, _NAME_BYTES + limits.CHUNK_MAX_BYTES),
    Reject.type: (_NAME_BYTES + 1, _NAME_BYTES + 1),
    Cancel.type: (_NAME_BYTES, _NAME_BYTES),
    Bye.type: (1, 1),
}
"""Frame type → smallest and largest body."""


def encode(message: Message) -> bytes:
    """Return the frame of a message."""
    names: tuple[ChunkId, ...] = ()
    rest = b""
    if isinstance(message, Have):
        names = message.chunks
    elif not isinstance(message, Bye):
        names = (message.chunk,)
    if isinstance(message, Chunk):
        rest = message.data
    elif isinstance(message, Want):
        rest = bytes([message.is_behind])
    elif isinstance(message, Bye | Reject):
        rest = bytes([message.reason])
    name = bytes.fromhex("".join(names))
    smallest, largest = _BODY_BYTES[message.type]
    length = len(name) + len(rest)
    if not smallest <= length <= largest:
        raise ValueError(f"a {type(message).__name__} cannot have a body of {length} bytes")
    return b"".join((_HEADER.pack(message.type, length), name, rest))


class FrameReader:
    """A decoder from bytes to messages; it holds at most one unfinished frame, whose size was checked at its header.

    `chunk_max_bytes` lowers the bound on CHUNK frames to the size that the caller expects (a manifest's chunk size; 0
    for a responder, which expects none).
    """

    def __init__(self, chunk_max_bytes: int = limits.CHUNK_MAX_BYTES) -> None:
        self._chunk_body_max_bytes = _NAME_BYTES + min(chunk_max_bytes, limits.CHUNK_MAX_BYTES)
        self._buffer = bytearray()
        self._frame_bytes = _HEADER.size
        self._has_header = False
        self.fault: PeerFault | None = None
        """The fault in the bytes after the messages returned last; the next call raises it."""

    @property
    def buffered_bytes(self) -> int:
        """Bytes of an incomplete frame; 0 at a frame boundary."""
        return len(self._buffer)

    @property
    def missing_bytes(self) -> int:
        """Bytes until the next message, if the length of its frame is known; else 1."""
        return self._frame_bytes - len(self._buffer) if self._has_header else 1

    @property
    def arriving(self) -> ChunkId | None:
        """The chunk whose frame is incomplete."""
        name_end = _HEADER.size + _NAME_BYTES
        if len(self._buffer) < name_end or self._buffer[0] != Chunk.type:
            return None
        return ChunkId(self._buffer[_HEADER.size : name_end].hex())

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that these bytes complete; after an error the reader must not be used any more.

        Messages before a bad frame count: they are returned first, and the next call raises the error.
        """
        messages: list[Message] = []
        rest = memoryview(data)
        if self.fault:
            raise self.fault
        try:
            while rest:
                taken = rest[: self._frame_bytes - len(self._buffer)]
                self._buffer += taken
                rest = rest[len(taken) :]
                if len(self._buffer) == self._frame_bytes:
                    self._complete(messages)
        except PeerFault as fault:
            if not messages:
                raise
            self.fault = fault
        return messages

    def _complete(self, messages: list[Message]) -> None:
        """Process a complete header or a complete frame."""
        if not self._has_header:
            self._frame_bytes += self._body_bytes()
            self._has_header = True
        else:
            messages.append(_decode(self._buffer))
            self._buffer = bytearray()
            self._frame_bytes = _HEADER.size
            self._has_header = False

    def _body_bytes(self) -> int:
        """Return the announced body length; reject a wrong one before any byte of the body is kept."""
        kind, length = _HEADER.unpack(self._buffer)
        if kind not in _BODY_BYTES:
            raise MalformedFrame(f"Frame type {kind} is not part of the chunk exchange.")
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
    """Decode a complete frame whose type and length are already checked."""
    kind = frame[0]
    if kind == Bye.type:
        if frame[-1] not in tuple(Farewell):
            raise MalformedFrame(f"BYE reason {frame[-1]} is not part of the chunk exchange.")
        return Bye(Farewell(frame[-1]))
    if kind == Have.type:
        if (len(frame) - _HEADER.size) % _NAME_BYTES:
            raise MalformedFrame("A HAVE frame does not end with a whole name.")
        starts = range(_HEADER.size, len(frame), _NAME_BYTES)
        return Have(tuple(ChunkId(frame[start : start + _NAME_BYTES].hex()) for start in starts))
    name_end = _HEADER.size + _NAME_BYTES
    chunk = ChunkId(frame[_HEADER.size : name_end].hex())
    if kind == Want.type:
        if frame[-1] > 1:
            raise MalformedFrame(f"A WANT says {frame[-1]} where 0 (in step) or 1 (behind) belongs.")
        return Want(chunk, is_behind=bool(frame[-1]))
    if kind == Cancel.type:
        return Cancel(chunk)
    if kind == Chunk.type:
        return Chunk(chunk, bytes(memoryview(frame)[name_end:]))
    if frame[-1] not in tuple(Reason):
        raise MalformedFrame(f"REJECT reason {frame[-1]} is not part of the chunk exchange.")
    return Reject(chunk, Reason(frame[-1]))
