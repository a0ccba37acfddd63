"""Ask one upstream for chunks, several at a time, and store what proves itself.

- The peer at the other end is authenticated; its chunks are verified before they are written.
- Whoever owes chunks and neither answers nor begins to send one for `patience_s` is given up. A WANT may take longer:
  it waits its turn behind others, or at the peer for a chunk that is still to come there. Whom else to ask meanwhile is
  the picker's business.
- Who is patient knocks again where nobody answers or the door is closed, less and less often, for `patience_s`: a full
  host closes it without a word.
- The first thing that goes wrong ends the upstream, with exactly one last word: `UpstreamFailed`, `Lied` or `Broke`.
  Another is `Parted`: a peer hangs up when it was asked for nothing for a while, which is nothing wrong.
- Reading never waits for the disk: chunks are stored beside, at most as many as may be asked for.
- What has arrived is verified and stored before the last word, whatever ended the exchange, but no longer than for
  `store_s`. So who sends wrong bytes and hangs up has lied: that outranks any end, and this node's failure a peer's.
"""

import math
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass

import trio

from protocol import limits
from protocol.errors import ChunkMismatch, PeerFault, SwarmError
from protocol.ids import ChunkId
from protocol.policy.chunks import chunk_id
from protocol.wire.exchange import Requester
from protocol.wire.frames import Bye, Cancel, Chunk, Farewell, Have, Reason, Reject, Want
from protocol.work.messages import Peer
from swarm_node.chunks.blobs import BlobStore
from swarm_node.p2p.host import Host
from swarm_node.p2p.link import Link, PeerStalled, PeerVanished

KNOCK_MAX_S = 10.0
"""Between two tries: of a thousand nodes a hundred come each second then, which costs a full host next to nothing."""


@dataclass(frozen=True)
class Deadlines:
    """How long one upstream may keep us waiting."""

    dial_s: float = 10.0
    patience_s: float = 60.0
    """From one answer, or the first bytes of one, to the next: 4 MiB at 70 kB/s, the slowest peer worth having; and
    longer than a WANT may wait there. As long it is knocked at a closed door, and an origin may take for a chunk."""
    stall_s: float = 20.0
    """For a WANT to be taken."""
    store_s: float = 10.0
    """For what has arrived to be verified and stored, once the exchange is over."""
    knock_s: float = 0.5
    """Before a second try at a door that was closed; doubled with each further one."""


@dataclass(frozen=True)
class Delivered:
    """A chunk is verified and on the disk."""

    source: str
    chunk: ChunkId
    data: bytes


@dataclass(frozen=True)
class Had:
    """The upstream says that it holds these."""

    source: str
    chunks: tuple[ChunkId, ...]


@dataclass(frozen=True)
class Began:
    """The first bytes of a chunk that was asked for are here."""

    source: str
    chunk: ChunkId


@dataclass(frozen=True)
class ChunkRefused:
    """The upstream answered without the chunk."""

    source: str
    chunk: ChunkId
    reason: Reason


@dataclass(frozen=True)
class UpstreamFailed:
    """The upstream is lost; everything asked of it and not delivered is open again."""

    source: str
    error: SwarmError


@dataclass(frozen=True)
class Parted:
    """The upstream hung up because nothing was asked of it for a while; what was asked at that moment is open again."""

    source: str


@dataclass(frozen=True)
class Lied:
    """The upstream sent other bytes under a chunk's name: the evidence."""

    source: str
    chunk: ChunkId
    got: ChunkId


@dataclass(frozen=True)
class Broke:
    """This node cannot go on: its disk is full, or worse."""

    error: SwarmError


Outcome = Delivered | Had | Began | ChunkRefused | UpstreamFailed | Parted | Lied | Broke


class _Liar(Exception):
    def __init__(self, chunk: ChunkId, got: ChunkId) -> None:
        self.chunk, self.got = chunk, got


class _Idle(Exception):
    """The peer hung up: nothing was asked of it for a while."""


class Upstream:
    """One stream to one peer; `ask` names chunks, `take_back` says which are not needed, `run` brings them in."""

    def __init__(
        self,
        host: Host,
        peer: Peer,
        blobs: BlobStore,
        sizes: Mapping[ChunkId, int],
        outcomes: trio.MemorySendChannel[Outcome],
        deadlines: Deadlines,
        *,
        patient: bool = False,
    ) -> None:
        self.peer = peer
        """As a later plan may name it elsewhere, it may change."""
        self.is_open = False
        """There is a stream to the peer, or was until the last word."""
        self.heard_at = -math.inf
        """When anything of the peer arrived, the last time."""
        self._host, self._blobs, self._sizes = host, blobs, sizes
        self._outcomes, self._deadlines, self._is_patient = outcomes, deadlines, patient
        self._orders_in, self._orders = trio.open_memory_channel[Want | Cancel](2 * limits.EXCHANGE_WANTS_MAX)
        self._requester = Requester()
        self._patience = trio.CancelScope()
        self._stores: set[trio.CancelScope] = set()
        self._stored_by = math.inf
        self._failure: Exception | None = None

    def ask(self, chunk: ChunkId, *, is_behind: bool = False) -> None:
        """Name one more chunk; at most `EXCHANGE_WANTS_MAX` may be undelivered."""
        self._orders_in.send_nowait(Want(chunk, is_behind))

    def take_back(self, chunk: ChunkId) -> None:
        """A chunk that was asked for is not needed any more; it may come all the same."""
        self._orders_in.send_nowait(Cancel(chunk))

    async def run(self) -> None:
        """Serve `ask` until the first failure, which is reported and not raised; cancelled, it says goodbye."""
        try:
            link = await self._reach()
            self.is_open = True
            await self._use(link)
        except _Liar as liar:
            await self._report(Lied(self.peer.peer_id, liar.chunk, liar.got))
        except _Idle:
            await self._report(Parted(self.peer.peer_id))
        except PeerFault as error:
            await self._report(UpstreamFailed(self.peer.peer_id, error))
        except SwarmError as error:
            await self._report(Broke(error))

    async def _reach(self) -> Link:
        knock_s, until = self._deadlines.knock_s, trio.current_time() + self._deadlines.patience_s
        while True:
            try:
                return await self._host.connect(
                    self.peer,
                    dial_s=self._deadlines.dial_s,
                    chunk_max_bytes=max(self._sizes.values(), default=0),
                )
            except (PeerVanished, PeerStalled):
                if not self._is_patient or trio.current_time() + knock_s >= until:
                    raise
            await trio.sleep(knock_s)
            knock_s = min(2 * knock_s, KNOCK_MAX_S)

    async def _use(self, link: Link) -> None:
        try:
            async with trio.open_nursery() as storing:
                try:
                    async with trio.open_nursery() as talking:

                        def store(answer: Chunk) -> None:
                            storing.start_soon(self._or_end, talking, self._store(answer))

                        talking.start_soon(self._or_end, talking, self._send_orders(link))
                        talking.start_soon(self._or_end, talking, self._be_answered(link, store))
                finally:
                    self._store_until(trio.current_time() + self._deadlines.store_s)
        finally:
            if isinstance(self._failure, PeerVanished | _Idle):
                await link.abort()
            else:
                self._host.part(link, Farewell.FAULT if self._failure else Farewell.DONE)
        if self._failure is not None:
            raise self._failure

    async def _or_end(self, talking: trio.Nursery, step: Coroutine[None, None, None]) -> None:
        """Run a part of the conversation, or store what came of it; any failure ends the conversation."""
        try:
            await step
        except (SwarmError, _Liar, _Idle) as error:
            if self._failure is None or _weight(error) > _weight(self._failure):
                self._failure = error
            talking.cancel_scope.cancel()

    async def _send_orders(self, link: Link) -> None:
        async for order in self._orders:
            message: Want | Cancel | None
            if isinstance(order, Want):
                owed_nothing = not self._requester.unanswered
                size_bytes = self._sizes[order.chunk]
                message = self._requester.want(order.chunk, size_bytes, is_behind=order.is_behind)
                if owed_nothing:
                    self._be_patient()
            else:
                message = self._requester.cancel(order.chunk)
            if message is not None:
                await link.send(message, stall_s=self._deadlines.stall_s)

    async def _be_answered(self, link: Link, store: Callable[[Chunk], None]) -> None:
        with self._patience:
            await self._take_answers(link, store)
        raise PeerStalled(f"Peer {link.peer} left {self._requester.unanswered} chunks unanswered.")

    async def _take_answers(self, link: Link, store: Callable[[Chunk], None]) -> None:
        arriving: ChunkId | None = None
        while True:
            messages = await link.receive()
            self.heard_at = trio.current_time()
            for message in messages:
                answer = self._requester.receive(message)
                if isinstance(answer, Bye):
                    if answer.reason is Farewell.IDLE:
                        raise _Idle
                    raise PeerVanished(f"Peer {link.peer} ended the exchange ({answer.reason.name.lower()}).")
                if isinstance(answer, Have):
                    await self._report(Had(link.peer, answer.chunks))
                    continue
                self._be_patient()
                if isinstance(answer, Reject):
                    await self._report(ChunkRefused(link.peer, answer.chunk, answer.reason))
                else:
                    store(answer)
            if link.arriving != arriving:
                arriving = link.arriving
                if arriving and self._requester.awaits(arriving):
                    self._be_patient()
                    await self._report(Began(link.peer, arriving))

    async def _store(self, answer: Chunk) -> None:
        """Verify a chunk and write it; a disk that hangs is left behind when time is up, and the chunk with it."""
        with trio.CancelScope(shield=True, deadline=self._stored_by) as scope:
            self._stores.add(scope)
            try:
                await trio.to_thread.run_sync(self._blobs.write, answer.chunk, answer.data, abandon_on_cancel=True)
            except ChunkMismatch:
                raise _Liar(answer.chunk, chunk_id(answer.data)) from None
            finally:
                self._stores.discard(scope)
        if not scope.cancelled_caught:
            await self._report(Delivered(self.peer.peer_id, answer.chunk, answer.data))

    def _store_until(self, time_s: float) -> None:
        """The conversation is over: so long may it take to store what came of it."""
        self._stored_by = time_s
        for scope in self._stores:
            scope.deadline = time_s

    async def _report(self, news: Outcome) -> None:
        with suppress(trio.BrokenResourceError):  # the download has ended meanwhile
            try:
                self._outcomes.send_nowait(news)
            except trio.WouldBlock:
                await self._outcomes.send(news)

    def _be_patient(self) -> None:
        """It is alive: from now on it has the whole time again."""
        patience_s = self._deadlines.patience_s if self._requester.unanswered else math.inf
        self._patience.deadline = trio.current_time() + patience_s


def _weight(failure: Exception) -> int:
    """Of two failures the heavier is told: a lie above all, then what this node itself cannot do."""
    return 2 if isinstance(failure, _Liar) else int(not isinstance(failure, PeerFault | _Idle))
