"""Wire format of Yamux: a header of twelve bytes, then the data of a DATA frame.

    version 0 | kind | flags (2 bytes) | stream (4) | length (4)      all big-endian

- DATA carries `length` bytes; WINDOW_UPDATE allows `length` more bytes; PING carries a value; GO_AWAY a reason.
- SYN opens a stream, ACK accepts it, FIN ends one direction, RST both; these flags are set on DATA or WINDOW_UPDATE.
- `YamuxFrameReader` never holds a body: it returns received bytes at once, so an announced length costs no memory.
"""

from collections.abc import Iterator
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from protocol.errors import PeerFault

PROTOCOL_ID = "/yamux/1.0.0"
INITIAL_WINDOW_BYTES = 256 * 1024
"""Bytes that either side may send on a new stream before any answer; fixed by the specification."""
LENGTH_MAX = 2**32 - 1

_HEADER = Struct("!BBHII")
HEADER_BYTES = _HEADER.size


class MuxViolation(PeerFault):
    """The peer broke the rules of the multiplexer; its connection ends."""

    code = "mux_violation"


class WindowExceeded(MuxViolation):
    """The peer sent more than it was allowed to."""

    code = "window_exceeded"


class PeerSilent(MuxViolation):
    """The peer sent nothing for two ticks, not even the answer to a ping."""

    code = "peer_silent"


class FrameFlood(MuxViolation):
    """The peer sends frames that carry nothing, faster than any use of the protocol does."""

    code = "frame_flood"


class FrameKind(IntEnum):
    """Kind of a frame."""

    DATA = 0
    WINDOW_UPDATE = 1
    PING = 2
    GO_AWAY = 3


class Flag(IntEnum):
    """Effect of a frame on its stream."""

    SYN = 1
    ACK = 2
    FIN = 4
    RST = 8


class FrameHeader(NamedTuple):
    """The header of a frame; kind and flags are valid."""

    kind: int
    flags: int
    stream: int
    length: int


def pack(kind: FrameKind, flags: int, stream: int, length: int) -> bytes:
    """Return the encoded header of a frame."""
    return _HEADER.pack(0, kind, flags, stream, length)


class YamuxFrameReader:
    """Parses bytes into headers, each followed by the pieces of its body."""

    def __init__(self) -> None:
        self._partial = bytearray()
        self._body_left = 0

    def feed(self, data: bytes) -> Iterator[FrameHeader | memoryview]:
        """Yield headers, and pieces of the body of the last DATA header, in order."""
        view = memoryview(data)
        at, end = 0, len(view)
        while at < end:
            if self._body_left:
                piece = view[at : at + self._body_left]
                at += len(piece)
                self._body_left -= len(piece)
                yield piece
            elif not self._partial and end - at >= HEADER_BYTES:
                yield self._header(view[at : at + HEADER_BYTES])
                at += HEADER_BYTES
            else:
                taken = view[at : at + HEADER_BYTES - len(self._partial)]
                at += len(taken)
                self._partial += taken
                if len(self._partial) == HEADER_BYTES:
                    header, self._partial = self._header(self._partial), bytearray()
                    yield header

    def _header(self, data: bytearray | memoryview) -> FrameHeader:
        version, kind, flags, stream, length = _HEADER.unpack(data)
        if version != 0 or kind > FrameKind.GO_AWAY or flags > _ALL_FLAGS:
            raise MuxViolation(f"No frame of Yamux begins with version {version}, kind {kind}, flags {flags:#x}.")
        if kind == FrameKind.DATA:
            self._body_left = length
        return FrameHeader(kind, flags, stream, length)


_ALL_FLAGS = Flag.SYN | Flag.ACK | Flag.FIN | Flag.RST
