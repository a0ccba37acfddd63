"""Exchange frames over one libp2p stream, to one authenticated peer.

- Whatever goes wrong below (reset, end, a torn connection) is a `PeerVanished`; bad frames keep their own names.
- `send` has a deadline for every slice, so a slow peer may take its time and a frozen one may not.
- A send that is cut short ends its stream; the connection and its other streams go on.
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
"""Of a long frame, what is waited for before it is looked at; far below what a first window allows."""


class PeerVanished(PeerFault):
    """The stream or the connection ended before the exchange did."""

    code = "peer_vanished"


class PeerStalled(PeerFault):
    """The peer is connected, but neither reads nor answers."""

    code = "peer_stalled"


class Link:
    """One stream of messages to one peer."""

    def __init__(self, stream: INetStream, peer: NodeId, *, chunk_max_bytes: int = limits.CHUNK_MAX_BYTES) -> None:
        self.peer = peer
        self._stream, self._bytes = stream, workarounds.under(stream)
        self._frames = FrameReader(chunk_max_bytes)
        self.moved_at = -math.inf
        """When its turn or a slice of a chunk began, the last time; nothing small counts, which anybody takes."""
        remote = self._bytes.get_remote_address()
        self.neighbourhood = neighbourhood(remote[0]) if remote else ""
        """Where the peer is."""

    async def send(self, message: Message, *, stall_s: float) -> None:
        """Write one frame; every slice of it must get through within `stall_s`."""
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
        except Exception as error:  # py-libp2p lets any layer's exception through; none of ours can occur in here
            raise self._lost(error) from error

    async def receive(self) -> list[Message]:
        """The messages completed by the next bytes that arrive; none if they complete nothing.

        A frame that has begun is waited for in large pieces: each packet of a slow link would wake us in vain.
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
        """The chunk of which a part was received."""
        return self._frames.arriving

    async def close(self, reason: Farewell = Farewell.DONE) -> None:
        """Say goodbye and close the stream; a peer that does not take it is cut off."""
        with trio.CancelScope(shield=True):
            try:
                with trio.fail_after(workarounds.CLOSE_PATIENCE_S):
                    await self._bytes.write(encode(Bye(reason)))
                    await self._stream.close()
            except Exception:  # it is gone already, or does not take a goodbye
                await self.abort()

    async def abort(self) -> None:
        """End the stream without a word."""
        await workarounds.reset(self._stream)

    def _lost(self, error: Exception) -> PeerFault:
        """What became of the peer, in the words of the layer that found out."""
        root: BaseException = error
        while root.__cause__ is not None:
            root = root.__cause__
        if isinstance(root, PeerSilent):
            return PeerStalled(f"Peer {self.peer} is connected, but silent. {named(root)}")
        return PeerVanished(f"The connection to peer {self.peer} ended ({named(root)}).")
