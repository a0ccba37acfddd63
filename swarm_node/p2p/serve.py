"""Answer other nodes' WANTs from the chunk store.

- A chunk is verified each time it is read for somebody; one that is not held is rejected as absent, at once.
- Bounded per peer (streams) and in total (streams, chunks in memory): beyond, the answer is busy.
- Every wait has a deadline: for a WANT to come, for a slot to get free, for the peer to take bytes.
- A chunk that has just been fetched is in the same store and is served to others from that moment on.
"""

from collections import Counter
from dataclasses import dataclass

import trio

from protocol.errors import PeerFault, UnknownChunk
from protocol.exchange import Chunk, Farewell, Message, Reason, Reject, Responder
from protocol.ids import ChunkId, NodeId
from swarm_node.blobs import BlobStore
from swarm_node.p2p.link import Link, PeerVanished


@dataclass(frozen=True)
class ServeLimits:
    """What serving others may cost this node."""

    streams_per_peer: int = 2
    streams: int = 128
    uploads: int = 16
    """Chunks in memory at once: 64 MiB at the largest chunk size."""
    slot_s: float = 5.0
    """Waiting for an upload slot; after that the peer is told to come back."""
    stall_s: float = 20.0
    peers_counted: int = 4096
    """Peers with a count of their own between two `take_sent`; identities are free."""
    idle_s: float = 120.0
    """Without a WANT the stream is closed; opening another costs two round trips."""


class ChunkServer:
    """Serves one chunk store; `handle` is given to `Host.serve`."""

    def __init__(self, blobs: BlobStore, limits: ServeLimits | None = None) -> None:
        self._blobs = blobs
        self._limits = limits or ServeLimits()
        self._streams: Counter[NodeId] = Counter()
        self._uploads = trio.CapacityLimiter(self._limits.uploads)
        self.bytes_sent = 0
        self.bytes_sent_to: Counter[NodeId] = Counter()
        """Per peer, for those that were served since the last `take_sent`."""

    def take_sent(self) -> dict[NodeId, int]:
        """The bytes sent per peer since the last call."""
        taken, self.bytes_sent_to = dict(self.bytes_sent_to), Counter()
        return taken

    async def handle(self, link: Link) -> None:
        """Serve one stream to its end."""
        if self._streams[link.peer] >= self._limits.streams_per_peer or self._streams.total() >= self._limits.streams:
            await link.close(Farewell.BUSY)
            return
        self._streams[link.peer] += 1
        try:
            await self._converse(link)
        except PeerVanished:
            await link.abort()
        except PeerFault:
            await link.close(Farewell.FAULT)
            raise
        finally:
            self._streams[link.peer] -= 1
            if not self._streams[link.peer]:
                del self._streams[link.peer]

    async def _converse(self, link: Link) -> None:
        responder = Responder()
        while not responder.ended:
            with trio.move_on_after(self._limits.idle_s) as patience:
                for message in await self._next_messages(link):
                    responder.receive(message)
            if patience.cancelled_caught:
                await link.close(Farewell.IDLE)
                return
            while (chunk := responder.next()) is not None:
                await self._answer(link, chunk)
        await link.close()

    async def _next_messages(self, link: Link) -> list[Message]:
        """One or more messages: a frame that comes in crumbs does not restart the idle deadline."""
        while not (messages := await link.receive()):
            pass
        return messages

    async def _answer(self, link: Link, chunk: ChunkId) -> None:
        """One CHUNK or REJECT, whatever happens."""
        try:
            with trio.fail_after(self._limits.slot_s):
                await self._uploads.acquire()
        except trio.TooSlowError:
            await link.send(Reject(chunk, Reason.BUSY), stall_s=self._limits.stall_s)
            return
        try:
            data = await trio.to_thread.run_sync(self._blobs.read, chunk)
        except UnknownChunk:
            await link.send(Reject(chunk, Reason.ABSENT), stall_s=self._limits.stall_s)
        else:
            await link.send(Chunk(chunk, data), stall_s=self._limits.stall_s)
            self.bytes_sent += len(data)
            if link.peer in self.bytes_sent_to or len(self.bytes_sent_to) < self._limits.peers_counted:
                self.bytes_sent_to[link.peer] += len(data)
        finally:
            self._uploads.release()
