"""Exchange frames over one libp2p stream, to one authenticated peer.

- Every transport failure (reset, end of stream, broken connection) is a `PeerVanished`; bad frames keep their errors.
- `send` has a deadline for every slice, so a slow peer is tolerated and a frozen one is not.
- A send that is cut short ends its stream; the connection and its other streams continue.
- `receive` may be cancelled at any time: bytes are read by the connection's own task.
"""

import math

import trio
from libp2p.abc import INetStream

from protocol import limits
from protocol.errors import PeerFault, named
from protocol.ids import ChunkId, NodeId
from protocol.people.addresses import neighbourhood
from protocol.wire.frames import Bye, Chunk, Farewell, FrameReader, Message, encode
from swarm_node.p2p import workarounds
from swarm_node.p2p.yamux_frames import PeerSilent

READ_BYTES = 256 * 1024
WRITE_BYTES = 1024 * 1024
"""One slice under one deadline."""

GATHERED_MAX_BYTES = 64 * 1024
"""Bytes of a long frame that are awaited before they are parsed; far below the first window."""


class PeerVanished(PeerFault):
    """The stream or the connection ended before the exchange did."""

    code = "peer_vanished"


class PeerStalled(PeerFault):
    """The peer is connected, but neither reads nor answers."""

    code = "peer_stalled"


class Link:
    """Stream of messages to one peer."""

    def __init__(self, stream: INetStream, peer: NodeId, *, chunk_max_bytes: int = limits.CHUNK_MAX_BYTES) -> None:
        self.peer = peer
        self._stream, self._bytes = stream, workarounds.under(stream)
        self._frames = FrameReader(chunk_max_bytes)
        self.moved_at = -math.inf
        """Start of the last turn or slice of a chunk; small frames do not count, since every peer accepts them."""
        remote = self._bytes.get_remote_address()
        self.neighbourhood = neighbourhood(remote[0]) if remote else ""
        """The network neighbourhood of the peer."""

    async def send(self, message: Message, *, stall_s: float) -> None:
        """Write one frame; each slice must be sent within `stall_s`."""
        frame = memoryview(encode(message))
        try:
            for start in range(0, len(frame), WRITE_BYTES):
                if isinstance(message, Chunk):
                    self.moved_at = trio.current_time()
                with trio.fail_after(stall_s):
                    await self._bytes.write(frame[start : start + WRITE_BYTES])
        except trio.TooSlowError:
            await self.abort()
            raise PeerStalled(f"Peer {self.peer} took no bytes for {stall_s:g} s.") from None
        except trio.Cancelled:
            await self.abort()
            raise
        except Exception as error:  # py-libp2p lets any layer's exception through; none of ours can occur in this block
            raise self._lost(error) from error

    async def receive(self) -> list[Message]:
        """Return the messages completed by the next bytes that arrive, or an empty list.

        A frame that has begun is read in large pieces: otherwise each packet of a slow link would wake us for nothing.
        """
        try:
            data = b"" if self._frames.fault else await self._bytes.read(READ_BYTES)
        except Exception as error:  # as above
            raise self._lost(error) from error
        messages = self._frames.feed(data)
        self._bytes.enough = min(self._frames.missing_bytes, GATHERED_MAX_BYTES)
        return messages

    @property
    def arriving(self) -> ChunkId | None:
        """The chunk that has been received in part."""
        return self._frames.arriving

    async def close(self, reason: Farewell = Farewell.DONE) -> None:
        """Send a BYE and close the stream; reset the stream if the peer does not accept the BYE."""
        with trio.CancelScope(shield=True):
            try:
                with trio.fail_after(workarounds.CLOSE_PATIENCE_S):
                    await self._bytes.write(encode(Bye(reason)))
                    await self._stream.close()
            except Exception:  # it has ended already, or does not accept a BYE
                await self.abort()

    async def abort(self) -> None:
        """End the stream without a BYE."""
        await workarounds.reset(self._stream)

    def _lost(self, error: Exception) -> PeerFault:
        """Return the error for a lost peer, with the message of the layer that detected it."""
        root: BaseException = error
        while root.__cause__ is not None:
            root = root.__cause__
        if isinstance(root, PeerSilent):
            return PeerStalled(f"Peer {self.peer} is connected, but silent. {named(root)}")
        return PeerVanished(f"The connection to peer {self.peer} ended ({named(root)}).")
