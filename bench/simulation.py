"""How a version spreads on paper: the real planner and picker over a network of fluid links, under a virtual clock.

- Time goes in small steps; in each, the active transfers share the links as TCP flows do, nearly max-min fair.
- A responder sends one chunk at a time on each stream, in the order of the WANTs that it can answer.
- Frames other than CHUNK take `latency_s`; hashing, disks and processors cost nothing here.
- As a bench it asks how near the fluid bound swarms of many sizes come, and what planning costs; `ARGS="--nodes 1000"`
  takes other sizes. A swarm of a hundred takes minutes: each of its nodes decides as a real one does.
"""

import argparse
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from bench.harness import Bench, quick_from_environment
from coordinator import topology
from coordinator.topology import SOURCE, NodeLinks, Topology
from protocol.frames import Reason
from protocol.ids import ChunkId
from swarm_node.picker import Ask, Picker, PickerRules
from swarm_node.sources import Source

SHARE_ROUNDS = 6
"""Rounds of sharing out what is left of each link; more change nothing that is visible."""


@dataclass(eq=False)
class _Stream:
    """What one responder still has to send to one requester."""

    number: int
    sending: deque[ChunkId] = field(default_factory=deque)
    waiting: dict[ChunkId, None] = field(default_factory=dict)


@dataclass(eq=False)
class _Peer:
    """One node: its picker, what it holds, and who listens to it."""

    name: str
    picker: Picker | None
    holds: set[ChunkId]
    upstreams: dict[str, _Stream] = field(default_factory=dict)
    downstreams: dict[str, _Stream] = field(default_factory=dict)
    done_at: float | None = None
    deaf: bool = False
    uploads: int = 0
    queue: deque[tuple[_Stream, ChunkId]] = field(default_factory=deque)
    wake: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """When each node had everything, and what it cost."""

    done_s: dict[str, float]
    source_bytes: float
    duplicate_bytes: float
    messages: int

    @property
    def completion_s(self) -> float:
        return max(self.done_s.values())


class Simulation:
    """One version on its way to every node."""

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
        step_s: float | None = None,
    ) -> None:
        self.plan = plan or topology.plan(source_up, nodes)
        self._rng = Random(seed)
        self._chunk_bytes = chunk_bytes
        self._chunks = [ChunkId(f"{number:064x}") for number in range(chunks)]
        self._up = np.array([source_up, *(node.up for node in nodes)])
        self._down = np.array([1.0, *(node.down for node in nodes)])
        self._place = {SOURCE: 0} | {node.name: place for place, node in enumerate(nodes, start=1)}
        self._latency_s = latency_s
        self._step_s = step_s or chunk_bytes / float(max(self._down[1:].max(), source_up)) / 2
        self._now = 0.0
        self._events: deque[tuple[float, str, str, tuple[ChunkId, ...]]] = deque()
        self._peers = {SOURCE: _Peer(SOURCE, None, set(self._chunks))}
        self._rules = rules
        self.messages = 0
        self._sent = np.zeros(len(self._up))
        self._duplicates = 0.0
        for node in nodes:
            self._peers[node.name] = _Peer(node.name, self._picker(node.name), set())
        self._streams: list[tuple[_Peer, _Peer, _Stream]] = []
        for name in self.plan.parents:
            for upstream in self.plan.upstreams(name):
                self._open(self._peers[upstream], self._peers[name])
        self._from = np.array([self._place[source.name] for source, _, _ in self._streams])
        self._to = np.array([self._place[target.name] for _, target, _ in self._streams])
        self._left = np.zeros(len(self._streams))

    def _picker(self, name: str) -> Picker:
        sources = [
            Source(upstream, "peer" if upstream != SOURCE else "seeder", tuple(stripes))
            for upstream, stripes in self.plan.upstreams(name).items()
        ]
        return Picker(
            self._chunks,
            self._chunks,
            sources,
            stripes=self.plan.stripes,
            rng=Random(self._rng.random()),
            now=0.0,
            rules=self._rules,
        )

    def _open(self, source: _Peer, target: _Peer) -> None:
        stream = _Stream(len(self._streams))
        source.downstreams[target.name] = target.upstreams[source.name] = stream
        self._streams.append((source, target, stream))

    def run(self, *, limit_s: float = 1e9) -> Outcome:
        """Step until every node that is not dead has everything."""
        waiting = [peer for peer in self._peers.values() if peer.picker]
        for peer in waiting:
            self._decide(peer)
        while any(peer.done_at is None and not peer.deaf for peer in waiting) and self._now < limit_s:
            self._step()
            for peer in waiting:
                if peer.done_at is None and not peer.deaf and self._now >= peer.wake:
                    self._decide(peer)
        done = {peer.name: peer.done_at for peer in waiting if peer.done_at is not None}
        return Outcome(done, self._sent[0], self._duplicates, self.messages)

    def kill(self, name: str) -> None:
        """A node is gone: nothing comes from it any more, and those who asked it learn of it."""
        dead = self._peers[name]
        dead.deaf = True
        for target_name, stream in dead.downstreams.items():
            self._left[stream.number] = 0.0
            stream.sending.clear()
            stream.waiting.clear()
            picker = self._peers[target_name].picker
            if picker is not None:
                picker.lied(name, self._now)
                self._peers[target_name].wake = 0.0
        for stream in dead.upstreams.values():
            self._left[stream.number] = 0.0
            stream.sending.clear()
            stream.waiting.clear()

    def _step(self) -> None:
        active = np.flatnonzero(self._left > 0)
        rates = self._share(active)
        self._now += self._step_s
        moved = np.minimum(rates * self._step_s, self._left[active])
        # What a stream does not need for the rest of its chunk goes to the chunk behind it.
        self._left[active] -= moved
        spare = rates * self._step_s - moved
        sent = np.bincount(self._from[active], moved, minlength=len(self._up))
        self._sent += sent
        arrived = active[self._left[active] <= 1e-6]
        extra = spare[self._left[active] <= 1e-6]
        changed: set[str] = set()
        for number, over in zip(arrived.tolist(), extra.tolist(), strict=True):
            changed |= self._arrive(number, over)
        while self._events and self._events[0][0] <= self._now:
            _, source, target, chunks = self._events.popleft()
            peer = self._peers[target]
            if peer.picker and peer.done_at is None:
                peer.picker.had(source, chunks, self._now)
                changed.add(target)
        for name in changed:
            if self._peers[name].done_at is None and not self._peers[name].deaf:
                self._decide(self._peers[name])

    def _share(self, active: np.ndarray) -> np.ndarray:
        """Rates of the active streams: what is left of both ends is shared out equally, several times."""
        source, target = self._from[active], self._to[active]
        up, down = self._up.copy(), self._down.copy()
        rates = np.zeros(len(active))
        growing = np.ones(len(active), dtype=bool)
        for _ in range(SHARE_ROUNDS):
            if not growing.any():
                break
            ups = np.bincount(source[growing], minlength=len(up))
            downs = np.bincount(target[growing], minlength=len(down))
            share = np.minimum(up[source] / np.maximum(ups[source], 1), down[target] / np.maximum(downs[target], 1))
            share = np.where(growing, share, 0.0)
            rates += share
            up = np.maximum(up - np.bincount(source, share, minlength=len(up)), 0.0)
            down = np.maximum(down - np.bincount(target, share, minlength=len(down)), 0.0)
            growing &= (up[source] > 1e-3 * self._up[source]) & (down[target] > 1e-3 * self._down[target])
        return rates

    def _arrive(self, number: int, over: float) -> set[str]:
        source, target, stream = self._streams[number]
        chunk = stream.sending.popleft()
        self._left[number] = 0.0
        source.uploads -= 1
        self._send(source)
        self._left[number] = max(0.0, self._left[number] - over)
        assert target.picker is not None
        if target.deaf or target.done_at is not None or not target.picker.delivered(source.name, chunk, self._now):
            self._duplicates += self._chunk_bytes
            return {target.name}
        target.holds.add(chunk)
        if not target.picker.missing:
            target.done_at = self._now
        changed = {target.name}
        for name, downstream in target.downstreams.items():
            if chunk in downstream.waiting:
                del downstream.waiting[chunk]
                self._enqueue(target, downstream, chunk)
            if chunk not in self._peers[name].holds:
                self.messages += 1
                self._events.append((self._now + self._latency_s, target.name, name, (chunk,)))
        return changed

    def _enqueue(self, source: _Peer, stream: _Stream, chunk: ChunkId) -> None:
        source.queue.append((stream, chunk))
        self._send(source)

    def _send(self, source: _Peer) -> None:
        """Begin what may begin: the oldest WANTs, one per stream, a few in all."""
        queue = source.queue
        for place, (stream, chunk) in enumerate(queue):
            if not stream.sending:
                del queue[place]
                stream.sending.append(chunk)
                self._left[stream.number] = self._chunk_bytes
                source.uploads += 1
                return self._send(source)

    def _decide(self, peer: _Peer) -> None:
        assert peer.picker is not None
        if peer.done_at is None and peer.picker.missing:
            for order in peer.picker.next(self._now):
                self.messages += 1
                stream = peer.upstreams[order.source]
                source = self._peers[order.source]
                if isinstance(order, Ask):
                    if source.deaf:
                        continue
                    if order.chunk in source.holds:
                        self._enqueue(source, stream, order.chunk)
                    else:
                        stream.waiting[order.chunk] = None
                else:
                    self._take_back(peer.picker, source.name, stream, order.chunk)
        peer.wake = peer.picker.wake_at(self._now)

    def _take_back(self, picker: Picker, source: str, stream: _Stream, chunk: ChunkId) -> None:
        if chunk in stream.waiting:
            del stream.waiting[chunk]
        elif (stream, chunk) in (queue := self._peers[source].queue):
            queue.remove((stream, chunk))
        else:
            return
        picker.refused(source, chunk, Reason.CANCELLED, self._now)


LINK_BYTES_PER_S = 2.5e6
MIXES: dict[str, tuple[tuple[float, ...], float]] = {"uniform": ((1.0,), 1.0), "mixed": ((0.5, 1.0, 2.0), 2.0)}
"""Uplinks in turns, and the downlink, in units of a link."""

PLANNED_NODES = (100, 1000, 10_000)
BOUND_MAX = 1.25


def swarm(count: int, mix: str) -> list[NodeLinks]:
    """So many nodes with links of one kind."""
    ups, down = MIXES[mix]
    return [
        NodeLinks(f"{number:05d}", ups[number % len(ups)] * LINK_BYTES_PER_S, down * LINK_BYTES_PER_S)
        for number in range(count)
    ]


def main() -> int:
    """Measure, print and judge."""
    quick = quick_from_environment()
    parser = argparse.ArgumentParser(prog="bench simulation", description=__doc__)
    parser.add_argument("--nodes", nargs="*", type=int, default=[10] if quick else [10, 30, 100])
    parser.add_argument("--chunks", type=int, default=256 if quick else 512)
    parser.add_argument("--source", type=float, default=8.0, help="the source's uplink, in units of a link")
    options = parser.parse_args(sys.argv[1:])
    bench = Bench("simulation", inputs=vars(options), quick=quick)
    source_up, chunk_bytes = options.source * LINK_BYTES_PER_S, 1 << 20
    for count in options.nodes:
        for mix in MIXES:
            nodes = swarm(count, mix)
            bound_s = topology.fluid_bound_s(options.chunks * chunk_bytes, source_up, nodes)
            name, ratios = f"{count} nodes, {mix}", []
            for seed in range(1 if quick else 3):
                world = Simulation(source_up, nodes, chunks=options.chunks, chunk_bytes=chunk_bytes, seed=seed)
                outcome = world.run(limit_s=10 * bound_s)
                assert len(outcome.done_s) == count, "somebody did not finish"
                ratios.append(outcome.completion_s / bound_s)
                bench.measure(f"{name}: completion / bound", ratios[-1], unit="×")
                bench.measure(f"{name}: messages per node", outcome.messages / count)
            bench.goal(f"{name}: at most {BOUND_MAX} × the bound", max(ratios), at_most=BOUND_MAX)
    for count in PLANNED_NODES:
        for mix in MIXES:
            nodes = swarm(count, mix)
            for _ in range(3):
                began = time.perf_counter()
                topology.plan(source_up, nodes)
                bench.measure(f"planning {count} nodes, {mix}", time.perf_counter() - began, unit="s")
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
