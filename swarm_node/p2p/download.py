"""Download of all chunks of a version into the store, from many sources at once.

- The picker decides, one upstream per source acts, this loop passes news between them; it ends when every chunk is
  stored, when the picker gives up (`NoSource`), or when this node itself cannot continue (its own error, e.g.
  `DiskFull`).
- All sources of the plan are connected at once, so that they can report what they hold, and again after a pause when
  the connection fails or ends. The exception, in a large swarm, is a seeder without a stripe for this node: it holds
  everything and keeps its connections for its children. It is dialled when it is needed, and may be full for a while.
- While no peer of the plan can be reached, another plan is requested in parallel (`AnotherPlan`) and followed from then
  on. Chunks under way are kept, and so is what is known about peers that are in both plans.
- Chunks that are already stored are not fetched: an interrupted download resumes by itself.
- The origin is a function of the caller; its bytes are verified like those of a peer.
- Cancelling is safe at any time and leaves only whole chunks behind.

Another plan is requested while no peer of the current plan has an open stream:

- The first time after `FIRST_S` ± 50 %: a restarting peer may be back by then, and nodes that lost the same peer do not
  all ask at the same moment.
- Each further time after twice the pause, up to `LONGEST_S`, until a stream is open again.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random

import trio

from protocol.errors import DiskFull, SwarmError, named
from protocol.ids import ChunkId
from protocol.wire.frames import Reason
from protocol.work.messages import Blame, FetchPlan, Peer
from swarm_node.chunks.arrivals import Arrivals
from swarm_node.chunks.blobs import BlobStore
from swarm_node.p2p.fetch import (
    ChunkBegan,
    ChunkMemory,
    ChunkRefused,
    ChunksAnnounced,
    Deadlines,
    Delivered,
    IdleStreamClosed,
    LocalFault,
    Outcome,
    SentWrongBytes,
    Upstream,
)
from swarm_node.p2p.host import Host
from swarm_node.picker.picker import Ask, Picker, TakeBack
from swarm_node.picker.sources import ORIGIN, ChunkSource, PickerRules, PlanPace

FIRST_S, LONGEST_S = 3.0, 60.0
"""A thousand nodes that lost all peers ask within three seconds, as they do when a version is published."""


def pauses_s(rng: Random) -> Iterator[float]:
    """Yield the pause before each request for another plan, in seconds."""
    pause_s = FIRST_S
    while True:
        yield pause_s * rng.uniform(0.5, 1.5)
        pause_s = min(2 * pause_s, LONGEST_S)


async def ask_while_alone(is_alone: Callable[[], bool], ask: Callable[[], Awaitable[object]], rng: Random) -> None:
    """Call `ask` after growing pauses while `is_alone()` is true; runs until it is cancelled."""
    pauses = pauses_s(rng)
    while True:
        await trio.sleep(next(pauses))
        if is_alone():
            await ask()
        else:
            pauses = pauses_s(rng)


Origin = Callable[[ChunkId], Awaitable[bytes]]
AnotherPlan = Callable[[], Awaitable[FetchPlan | None]]
"""Request the current plan; None if there is no answer."""

NEWS_MAX = 64
"""Messages that may wait for the next round of decisions; beyond that, their senders wait."""


class NoSource(SwarmError):
    """A version cannot be completed: no source is left that could deliver the missing chunks."""

    code, http_status, fault = "no_source", 503, "network"


@dataclass(frozen=True)
class DownloadProgress:
    """Progress of a download."""

    chunks_done: int
    chunks: int
    bytes_done: int
    bytes: int


@dataclass(frozen=True)
class _Replanned:
    """Message: a new plan has arrived."""

    plan: FetchPlan


@dataclass
class FetchReport:
    """Result of a download: sources, bytes, failures, and the peers to blame for them."""

    bytes_from: Counter[str] = field(default_factory=Counter)
    """Bytes by kind of source: peer, seeder, origin."""
    bytes_from_node: Counter[str] = field(default_factory=Counter)
    """Bytes by sending peer, whether or not the bytes were needed; without the origin."""
    busy_s: dict[str, float | None] = field(default_factory=dict)
    """Time that each peer was sending, in seconds; None if unknown."""
    bytes_on_disk: int = 0
    """Needed, but already stored."""
    bytes_twice: int = 0
    """Requested from a second source because the first was late, and then delivered by both."""
    plans: list[FetchPlan] = field(default_factory=list)
    """The plans that the download followed, in order."""
    blames: list[Blame] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class FetchRules:
    """Deadlines and choices of a download; tests shorten them."""

    deadlines: Deadlines = field(default_factory=Deadlines)
    picker: PickerRules = field(default_factory=PickerRules)
    failures_kept: int = 20


async def fetch_chunks(
    sizes: Mapping[ChunkId, int],
    plan: FetchPlan,
    *,
    order: Sequence[ChunkId] | None = None,
    host: Host,
    blobs: BlobStore,
    arrivals: Arrivals,
    rng: Random,
    origin: Origin | None = None,
    another_plan: AnotherPlan | None = None,
    blames: Mapping[str, int] | None = None,
    on_progress: Callable[[DownloadProgress], None] | None = None,
    rules: FetchRules | None = None,
    memory: ChunkMemory | None = None,
    report: FetchReport | None = None,
) -> FetchReport:
    """Fetch every chunk; return once all are verified and stored.

    `order` lists all chunks of the version's manifest, which fixes the stripes; the default is the order of `sizes`.
    `report`, if given, is filled even on failure.
    """
    download = _Download(
        sizes,
        list(order or sizes),
        host,
        blobs,
        arrivals,
        origin,
        on_progress,
        rules or FetchRules(),
        memory or ChunkMemory(),
    )
    download.report = report or download.report
    await download.run(plan, another_plan, rng, blames or {})
    return download.report


class _Download:
    """The download of one version."""

    def __init__(
        self,
        sizes: Mapping[ChunkId, int],
        order: Sequence[ChunkId],
        host: Host,
        blobs: BlobStore,
        arrivals: Arrivals,
        origin: Origin | None,
        on_progress: Callable[[DownloadProgress], None] | None,
        rules: FetchRules,
        memory: ChunkMemory,
    ) -> None:
        self._sizes, self._order, self._size_bytes = sizes, order, sum(sizes.values())
        self._plan: FetchPlan
        self._peers: dict[str, Peer] = {}
        self._kinds = {ORIGIN: ORIGIN}
        self._host, self._blobs, self._arrivals, self._origin = host, blobs, arrivals, origin
        self._on_progress, self._rules = on_progress, rules
        self._memory = memory
        self._upstreams: dict[str, Upstream] = {}
        self._news_in, self._news = trio.open_memory_channel[Outcome | _Replanned](NEWS_MAX)
        self._bytes_done = self._chunks_done = 0
        self._broke: SwarmError | None = None
        self.report = FetchReport()

    async def run(
        self, plan: FetchPlan, another_plan: AnotherPlan | None, rng: Random, blames: Mapping[str, int]
    ) -> None:
        started = trio.current_time()
        self._go_by(plan)
        missing = await trio.to_thread.run_sync(self._missing)
        self._progressed(self._size_bytes - sum(self._sizes[chunk] for chunk in missing), len(missing))
        self.report.bytes_on_disk = self._bytes_done
        picker = Picker(
            self._order,
            missing,
            self._sources(),
            stripes=self._plan.stripes,
            rng=rng,
            now=started,
            rules=self._rules.picker,
            blames=blames,
            pace=self._pace(),
        )
        error: SwarmError | None = None
        held = self._sizes.keys() - missing
        async with trio.open_nursery() as nursery:
            if another_plan is not None:
                nursery.start_soon(ask_while_alone, self._is_alone, partial(self._ask_for_plan, another_plan), rng)
            with self._arrivals.expecting(missing, held):
                error = await self._drive(picker, nursery)
            self._news.close()
            nursery.cancel_scope.cancel()
        self.report.seconds = trio.current_time() - started
        self.report.busy_s = {name: picker.busy_s(name) for name in self.report.bytes_from_node}
        if error is not None:
            raise error

    def _go_by(self, plan: FetchPlan) -> None:
        """Follow `plan` from now on; a peer that is not in it stays while an exchange with it is under way."""
        self.report.plans.append(plan)
        self._plan = plan
        named = {peer.peer_id: peer for peer in plan.peers if peer.peer_id != self._host.node_id}
        self._peers = {name: self._peers[name].model_copy(update={"stripes": ()}) for name in self._upstreams} | named
        self._kinds |= {name: peer.kind for name, peer in named.items()}
        for name, upstream in self._upstreams.items():
            upstream.peer = self._peers[name]

    def _is_alone(self) -> bool:
        return not any(upstream.is_open for upstream in self._upstreams.values())

    async def _ask_for_plan(self, another_plan: AnotherPlan) -> None:
        plan = await another_plan()
        if plan is not None:
            with suppress(trio.BrokenResourceError):  # the download has ended meanwhile
                await self._news_in.send(_Replanned(plan))

    def _pace(self) -> PlanPace:
        plan, chunk_bytes = self._plan, max(self._sizes.values(), default=0)
        return PlanPace.from_plan(
            chunk_bytes, stripes=plan.stripes, rate=plan.rate, hops=plan.hops, help_rate=plan.help_rate
        )

    def _missing(self) -> list[ChunkId]:
        return [chunk for chunk in self._sizes if not self._blobs.has(chunk)]

    def _sources(self) -> list[ChunkSource]:
        origin = [ChunkSource(ORIGIN, "origin")] if self._origin is not None else []
        return [ChunkSource(peer.peer_id, peer.kind, peer.stripes) for peer in self._peers.values()] + origin

    async def _drive(self, picker: Picker, nursery: trio.Nursery) -> SwarmError | None:
        while picker.missing:
            now = trio.current_time()
            if picker.hopeless(now):
                return self._no_source(picker)
            self._open_all(picker, now, nursery)
            for name, upstream in self._upstreams.items():
                picker.record_arrival(name, upstream.heard_at)
            for order in picker.next(now):
                self._act(order, nursery, is_behind=picker.is_behind)
            with trio.move_on_at(picker.wake_at(now)):
                while not self._handle(await self._news.receive(), picker):
                    pass
                with suppress(trio.WouldBlock):
                    while self._broke is None:
                        self._handle(self._news.receive_nowait(), picker)
            if self._broke is not None:
                return self._broke
        return None

    def _open_all(self, picker: Picker, now: float, nursery: trio.Nursery) -> None:
        """Connect to every useful peer: even a peer that has nothing for us now may announce chunks later."""
        for name in self._peers:
            if name not in self._upstreams and not self._is_in_reserve(name) and picker.is_able(name, now):
                self._open(name, nursery)

    def _act(self, order: Ask | TakeBack, nursery: trio.Nursery, *, is_behind: bool) -> None:
        name, chunk = order.source, order.chunk
        if isinstance(order, TakeBack):
            if name in self._upstreams:
                self._upstreams[name].take_back(chunk)
        elif name == ORIGIN:
            nursery.start_soon(self._ask_origin, chunk)
        else:
            if name not in self._upstreams:
                self._open(name, nursery)
            self._upstreams[name].ask(chunk, is_behind=is_behind)

    def _is_in_reserve(self, name: str) -> bool:
        """Return True for a seeder without a stripe for this node, in a swarm where seeders are asked sparingly."""
        peer = self._peers[name]
        return peer.kind == "seeder" and not peer.stripes and self._plan.help_rate > 0

    def _open(self, name: str, nursery: trio.Nursery) -> None:
        upstream = Upstream(
            self._host,
            self._peers[name],
            self._blobs,
            self._sizes,
            self._news_in,
            self._rules.deadlines,
            memory=self._memory,
            patient=self._is_in_reserve(name),
        )
        self._upstreams[name] = upstream
        nursery.start_soon(upstream.run)

    def _handle(self, news: Outcome | _Replanned, picker: Picker) -> bool:
        """Pass the news to the picker; return True if it calls for decisions at once."""
        now = trio.current_time()
        if isinstance(news, _Replanned):
            self._go_by(news.plan)
            picker.follow(self._sources(), stripes=self._plan.stripes, pace=self._pace())
            return True
        if isinstance(news, ChunksAnnounced):
            return picker.had(news.source, news.chunks, now)
        if isinstance(news, ChunkBegan):
            return picker.began(news.source, news.chunk, now)
        if isinstance(news, LocalFault):
            self._broke = news.error
        elif isinstance(news, Delivered):
            if news.source != ORIGIN:
                self.report.bytes_from_node[news.source] += len(news.data)
            if not picker.delivered(news.source, news.chunk, now):
                self.report.bytes_twice += len(news.data)
                return True
            self._arrivals.arrived(news.chunk, news.data)
            self.report.bytes_from[self._kinds[news.source]] += len(news.data)
            self._progressed(len(news.data), picker.missing)
        elif isinstance(news, ChunkRefused):
            picker.refused(news.source, news.chunk, news.reason, now)
        elif isinstance(news, IdleStreamClosed):
            self._upstreams.pop(news.source, None)
            picker.parted(news.source, now)
        elif isinstance(news, SentWrongBytes):
            self._upstreams.pop(news.source, None)
            picker.lied(news.source, now)
            self.report.blames.append(Blame(peer_id=news.source, chunk=news.chunk, got=news.got))
            self._note(f"{news.source} sent {news.got[:12]}… for chunk {news.chunk[:12]}…")
        else:
            self._upstreams.pop(news.source, None)
            picker.failed(news.source, now)
            self._note(named(news.error))
        return True

    async def _ask_origin(self, chunk: ChunkId) -> None:
        """Fetch one chunk from the origin, under the same rules as from a peer; a failure affects no other request.

        It does not wait for memory, which slow peers may hold: the picker asks the origin for a few chunks at a time.
        """
        self._memory.hold(self._sizes[chunk])
        try:
            await self._fetch_from_origin(chunk)
        finally:
            self._memory.release(self._sizes[chunk])

    async def _fetch_from_origin(self, chunk: ChunkId) -> None:
        assert self._origin is not None
        news: Outcome
        try:
            with trio.fail_after(self._rules.deadlines.patience_s):
                data = await self._origin(chunk)
            await trio.to_thread.run_sync(self._blobs.write, chunk, data)
            news = Delivered(ORIGIN, chunk, data)
        except DiskFull as error:
            news = LocalFault(error)
        except (SwarmError, trio.TooSlowError) as error:
            self._note(f"{ORIGIN}: {named(error) if isinstance(error, SwarmError) else 'no answer in time'}")
            news = ChunkRefused(ORIGIN, chunk, Reason.BUSY)
        with suppress(trio.BrokenResourceError):  # the download has ended meanwhile
            await self._news_in.send(news)

    def _progressed(self, size_bytes: int, missing: int) -> None:
        self._bytes_done += size_bytes
        self._chunks_done = len(self._sizes) - missing
        if self._on_progress is not None:
            self._on_progress(DownloadProgress(self._chunks_done, len(self._sizes), self._bytes_done, self._size_bytes))

    def _note(self, failure: str) -> None:
        self.report.failures.append(failure)
        del self.report.failures[: -self._rules.failures_kept]

    def _no_source(self, picker: Picker) -> NoSource:
        tried = "; ".join(self.report.failures[-3:]) or "no source is known"
        return NoSource(
            f"{picker.missing} of {len(self._sizes)} chunks are missing and nobody delivers them ({tried}).",
            hint="The download resumes from what is stored; it will be tried again with a new plan.",
        )
