"""Simulation of the broadcast of a version: the state of every node, and the messages between them.

- A responder sends one chunk at a time on each stream, in the order of the WANTs that it can answer; a WANT for a chunk
  that is still to come waits there. It tells its news to all at once, at most every `TELL_S`.
- Frames and last bytes take `latency_s` and by chance up to `jitter_s` more, to the nearest tick; on one stream they
  arrive in order. All that reached a node in a tick is one piece of news: it decides once.
- A node may be halted: it neither decides nor begins a chunk, and what arrives meanwhile comes in one lump afterwards.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

from bench.simulation.links import Links
from coordinator.rules import topology
from coordinator.rules.topology import SOURCE, NodeLinks, Topology
from protocol.ids import ChunkId
from protocol.wire.frames import Reason
from swarm_node.p2p.serve import ServeLimits
from swarm_node.p2p.turns import Turns
from swarm_node.picker.picker import Ask, Picker
from swarm_node.picker.sources import ChunkSource, PickerRules, PlanPace

LIMITS = ServeLimits()

TELL_S = LIMITS.news_s
"""The time between two HAVEs to the same node."""

TICK = 1 / 8
"""The tick as a share of the time that a chunk takes on the fastest downlink."""


@dataclass(eq=False, slots=True)
class _Stream:
    """The chunks that a responder still has to send to a requester."""

    number: int
    source: "_Node"
    target: "_Node"
    sending: ChunkId | None = None
    ready: list[ChunkId] = field(default_factory=list)
    waiting: set[ChunkId] = field(default_factory=set)
    is_behind: bool = False
    """The requester's statement about itself in its last WANT."""
    last_ticks: list[int] = field(default_factory=lambda: [0, 0])
    """The ticks at which the last frame arrives at the source, and at the target."""


@dataclass(eq=False, slots=True)
class _Node:
    """A node: its picker, its chunks, and its requesters."""

    name: str
    holds: set[ChunkId] = field(default_factory=set)
    upstreams: dict[str, _Stream] = field(default_factory=dict)
    downstreams: list[_Stream] = field(default_factory=list)
    turns: Turns[_Stream] = field(default_factory=lambda: Turns(LIMITS.turns))
    picker: Picker | None = None
    news: list[ChunkId] = field(default_factory=list)
    """Chunks that it got and has not told yet."""
    told_tick: int = -1_000_000
    has_heard: bool = True
    """Something reached it in this tick."""
    wake_s: float = 0.0
    done_s: float | None = None
    dead: bool = False
    halted_until: int = -1
    """The first tick in which its process runs again."""
    asked: set[ChunkId] = field(default_factory=set)
    """Every chunk that it has asked anybody for."""

    @property
    def fetches(self) -> bool:
        return self.done_s is None and not self.dead


@dataclass(frozen=True)
class Outcome:
    """The time when each node had everything, and the cost."""

    done_s: dict[str, float]
    source_bytes: float
    duplicate_bytes: float
    messages: int
    """Frames of all kinds but CHUNK."""
    decisions: int
    asked_again: int
    """WANTs for a chunk that the same node had asked somebody for before."""

    @property
    def completion_s(self) -> float:
        return max(self.done_s.values())


class Simulation:
    """The broadcast of a version to all nodes."""

    def __init__(
        self,
        source_up: float,
        nodes: Sequence[NodeLinks],
        *,
        chunks: int,
        chunk_bytes: int,
        seed: int,
        plan: Topology | None = None,
        rules: PickerRules | None = None,
        latency_s: float = 0.0,
        jitter_s: float = 0.0,
        tick: float = TICK,
    ) -> None:
        self._plan = plan or topology.plan(source_up, nodes)
        self._chunk_bytes = chunk_bytes
        self._chunks = [ChunkId(f"{number:064x}") for number in range(chunks)]
        self._tick_s = tick * chunk_bytes / max(node.down for node in nodes)
        self._latency, self._jitter = round(latency_s / self._tick_s), round(jitter_s / self._tick_s)
        self._chance = Random(seed)
        self._between_news = round(TELL_S / self._tick_s)
        self._tick = 0
        self._due: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)
        self._messages = self._decisions = self._from_source = self._duplicates = self._asked_again = 0
        self._nodes = {node.name: _Node(node.name) for node in nodes}
        self._source = _Node(SOURCE, set(self._chunks))
        self._streams: list[_Stream] = []
        rng = Random(seed)
        for node in self._nodes.values():
            node.picker = self._picker(node.name, rng, rules)
            for upstream in self._plan.upstreams(node.name):
                self._connect(self._nodes.get(upstream, self._source), node)
        places = {name: place for place, name in enumerate((SOURCE, *self._nodes))}
        self._links = Links(
            [source_up, *(node.up for node in nodes)],
            [source_up, *(node.down for node in nodes)],
            [(places[stream.source.name], places[stream.target.name]) for stream in self._streams],
        )

    def _picker(self, name: str, rng: Random, rules: PickerRules | None) -> Picker:
        sources = [
            ChunkSource(upstream, "peer" if upstream != SOURCE else "seeder", tuple(stripes))
            for upstream, stripes in self._plan.upstreams(name).items()
        ]
        rng = Random(rng.random())
        plan = self._plan
        pace = PlanPace.from_plan(
            self._chunk_bytes, stripes=plan.stripes, rate=plan.rate, hops=plan.hops(name), help_rate=plan.help_rate
        )
        return Picker(
            self._chunks, self._chunks, sources, stripes=plan.stripes, rng=rng, now=0.0, rules=rules, pace=pace
        )

    def _connect(self, source: _Node, target: _Node) -> None:
        stream = _Stream(len(self._streams), source, target)
        target.upstreams[source.name] = stream
        source.downstreams.append(stream)
        self._streams.append(stream)

    @property
    def _now_s(self) -> float:
        return self._tick * self._tick_s

    def run(self, *, limit_s: float = 1e9) -> Outcome:
        """Let time pass until every node that is not dead has everything."""
        fetching = [node for node in self._nodes.values() if node.fetches]
        while fetching and self._now_s < limit_s:
            now_s = self._now_s
            for node in fetching:
                if (node.has_heard or now_s >= node.wake_s) and self._tick >= node.halted_until:
                    self._decide(node)
            self._take_frames()
            arrived = self._links.flow(self._tick_s)
            self._tick += 1
            for number, beyond_bytes in arrived:
                self._sent(self._streams[number], beyond_bytes)
            self._take_frames()
            fetching = [node for node in fetching if node.fetches]
        return Outcome(
            {node.name: node.done_s for node in self._nodes.values() if node.done_s is not None},
            self._from_source * self._chunk_bytes,
            self._duplicates * self._chunk_bytes,
            self._messages,
            self._decisions,
            self._asked_again,
        )

    def kill(self, name: str) -> None:
        """A node is gone: nothing comes from it any more, and those who asked it learn of it."""
        self.freeze(name)
        for stream in self._nodes[name].downstreams:
            assert stream.target.picker
            stream.target.picker.lied(name, self._now_s)
            stream.target.has_heard = True

    def freeze(self, name: str) -> None:
        """Freeze a node: it sends nothing any more, and no other node learns that."""
        dead = self._nodes[name]
        dead.dead = True
        for stream in (*dead.downstreams, *dead.upstreams.values()):
            self._links.stop(stream.number)
            stream.sending = None
            stream.ready.clear()
            stream.waiting.clear()
            stream.source.turns.leave(stream)
        for stream in dead.upstreams.values():
            self._begin_next(stream.source)

    def halt(self, name: str, seconds: float) -> None:
        """The process of a node does not run for a while."""
        node = self._nodes[name]
        node.halted_until = self._tick + round(seconds / self._tick_s)
        self._later(partial(self._begin_next, node), node.halted_until - self._tick)

    def _later(self, what: Callable[[], None], ticks: int) -> None:
        self._due[self._tick + ticks].append(what)

    def _send_frame(self, stream: _Stream, receiver: _Node, arrive: Callable[[], None]) -> None:
        """A frame, or the first or last byte of a chunk, is on its way to one end of a stream."""
        end = int(receiver is stream.target)
        delay = self._latency + (self._chance.randint(0, self._jitter) if self._jitter else 0)
        stream.last_ticks[end] = max(stream.last_ticks[end], self._tick + delay)
        self._later(partial(self._when_running, receiver, arrive), stream.last_ticks[end] - self._tick)

    def _when_running(self, node: _Node, act: Callable[[], None]) -> None:
        if self._tick < node.halted_until:
            self._later(act, node.halted_until - self._tick)
        else:
            act()

    def _take_frames(self) -> None:
        while self._tick in self._due:
            for arrive in self._due.pop(self._tick):
                arrive()

    def _decide(self, node: _Node) -> None:
        assert node.picker
        now_s = self._now_s
        node.has_heard = False
        self._decisions += 1
        for order in node.picker.next(now_s):
            stream, chunk = node.upstreams[order.source], order.chunk
            self._messages += 1
            if isinstance(order, Ask):
                self._asked_again += chunk in node.asked
                node.asked.add(chunk)
                want = partial(self._want, stream, chunk, is_behind=node.picker.is_behind)
                self._send_frame(stream, stream.source, want)
            else:
                self._send_frame(stream, stream.source, partial(self._cancel, stream, chunk))
        node.wake_s = node.picker.wake_at(now_s)

    def _want(self, stream: _Stream, chunk: ChunkId, *, is_behind: bool) -> None:
        if stream.source.dead:
            return
        stream.is_behind = is_behind
        if chunk in stream.source.holds:
            self._send(stream, chunk)
        else:
            stream.waiting.add(chunk)

    def _cancel(self, stream: _Stream, chunk: ChunkId) -> None:
        if chunk in stream.waiting:
            stream.waiting.remove(chunk)
        elif chunk in stream.ready:
            stream.ready.remove(chunk)
            if not stream.ready and stream.sending is None:
                stream.source.turns.leave(stream)
        else:
            return
        self._messages += 1
        self._send_frame(stream, stream.target, partial(self._refused, stream, chunk))

    def _refused(self, stream: _Stream, chunk: ChunkId) -> None:
        assert stream.target.picker
        stream.target.picker.refused(stream.source.name, chunk, Reason.CANCELLED, self._now_s)

    def _send(self, stream: _Stream, chunk: ChunkId) -> None:
        stream.ready.append(chunk)
        if stream.sending is None and len(stream.ready) == 1:
            stream.source.turns.wait(stream, self._now_s, is_behind=stream.is_behind)
            self._begin_next(stream.source)

    def _begin_next(self, source: _Node, already_bytes: float = 0.0) -> None:
        """Start the next streams; the first begins with the bytes that a link could have sent since the last tick."""
        if self._tick < source.halted_until:
            return
        for stream in source.turns.admit(self._now_s):
            self._begin(stream, stream.ready.pop(0), self._chunk_bytes - already_bytes)
            already_bytes = 0.0

    def _begin(self, stream: _Stream, chunk: ChunkId, size_bytes: float) -> None:
        stream.sending = chunk
        self._links.begin(stream.number, size_bytes)
        self._send_frame(stream, stream.target, partial(self._began, stream, chunk))

    def _began(self, stream: _Stream, chunk: ChunkId) -> None:
        node = stream.target
        if node.fetches:
            assert node.picker
            node.has_heard |= node.picker.began(stream.source.name, chunk, self._now_s)

    def _sent(self, stream: _Stream, beyond_bytes: float) -> None:
        """The last byte of a chunk is on its way; the next one begins."""
        chunk = stream.sending
        assert chunk is not None
        stream.sending = None
        stream.source.turns.leave(stream)
        if stream.ready:
            stream.source.turns.wait(stream, self._now_s, is_behind=stream.is_behind)
        self._begin_next(stream.source, beyond_bytes)
        self._from_source += stream.source is self._source
        self._send_frame(stream, stream.target, partial(self._delivered, stream, chunk))

    def _delivered(self, stream: _Stream, chunk: ChunkId) -> None:
        node = stream.target
        assert node.picker
        node.has_heard = True
        if not node.fetches or not node.picker.delivered(stream.source.name, chunk, self._now_s):
            self._duplicates += 1
            return
        node.holds.add(chunk)
        if not node.picker.missing:
            node.done_s = self._now_s
        for downstream in node.downstreams:
            if chunk in downstream.waiting:
                downstream.waiting.remove(chunk)
                self._send(downstream, chunk)
        if not node.news:
            wait = max(0, node.told_tick + self._between_news - self._tick)
            self._later(partial(self._when_running, node, partial(self._tell, node)), wait)
        node.news.append(chunk)

    def _tell(self, node: _Node) -> None:
        news, node.news = tuple(node.news), []
        node.told_tick = self._tick
        for stream in node.downstreams:
            if stream.target.fetches:
                self._messages += 1
                self._send_frame(stream, stream.target, partial(self._hear, stream, news))

    def _hear(self, stream: _Stream, news: tuple[ChunkId, ...]) -> None:
        node = stream.target
        if node.fetches:
            assert node.picker
            node.has_heard |= node.picker.had(stream.source.name, news, self._now_s)
