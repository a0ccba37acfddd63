"""Which missing chunk to ask of whom: pure decisions; time and chance are arguments.

- Everyone who fetches the same version sorts the same names and gets an equal *share* of the chunks, so nodes begin
  with different chunks and can trade. A peer is asked for its own share first: that is what it has first.
- The seeder is asked for our own share. Beyond it only when no peer delivered anything for `patience_s`, or for
  `busy_patience_s` while one still owes us an answer: the seeder's uplink feeds everybody.
- The origin is the last resort: for chunks the seeder lacks, when nobody delivered anything for `origin_patience_s`,
  and when no other source is left.
- A chunk is asked of one source at a time; when nothing else is left to ask, one that a source has owed us for
  `overdue_s` is asked of a second one.
- A source has at most `window` chunks to answer, and one while it pauses after saying absent or busy.
- A source that failed pauses, longer each time, and is given up after `strikes_max` failures without a delivery.
  One that lied is never asked again.
- Every chunk is delivered, or `hopeless` says that it never will be: no source is left, or none delivered anything
  for `give_up_s`.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from protocol.exchange import Reason
from protocol.ids import ChunkId, NodeId

ORIGIN = "origin"
"""The name of the source that is not a node."""


@dataclass(frozen=True)
class Source:
    """Somebody who may have chunks; `name` is a node id, or `ORIGIN`."""

    name: str
    kind: Literal["peer", "seeder", "origin"]


@dataclass(frozen=True)
class Assignment:
    """Ask this source for this chunk now."""

    source: str
    chunk: ChunkId


@dataclass(frozen=True)
class PickerRules:
    """The numbers behind the rules above."""

    window: int = 4
    patience_s: float = 1.0
    busy_patience_s: float = 5.0
    origin_patience_s: float = 3.0
    overdue_s: float = 3.0
    pause_s: float = 0.03
    pause_max_s: float = 1.0
    failure_pause_s: float = 0.5
    strikes_max: int = 4
    give_up_s: float = 60.0


class _Queue:
    """Chunks still worth asking one source for, each at most once."""

    def __init__(self) -> None:
        self._order: OrderedDict[ChunkId, None] = OrderedDict()

    def push(self, chunk: ChunkId) -> None:
        self._order.setdefault(chunk)

    def pop(self, wanted: set[ChunkId]) -> ChunkId | None:
        """The first chunk that is still wanted; those before it leave the queue."""
        while self._order:
            chunk, _ = self._order.popitem(last=False)
            if chunk in wanted:
                return chunk
        return None


@dataclass
class _State:
    """What the picker knows about one source."""

    source: Source
    first: _Queue
    later: _Queue
    score: int
    asked: dict[ChunkId, float] = field(default_factory=dict)
    """What it owes us, and since when."""
    paused_until: float = -math.inf
    pauses: int = 0
    strikes: int = 0
    gone: bool = False

    def free(self, now: float, window: int) -> int:
        if self.gone or now < self.paused_until:
            return 0
        return (1 if self.pauses else window) - len(self.asked)


class Picker:
    """The state of fetching one version: `next` assigns, the other verbs report what became of it."""

    def __init__(
        self,
        missing: Sequence[ChunkId],
        sources: Iterable[Source],
        *,
        me: NodeId,
        rng: Random,
        now: float,
        rules: PickerRules | None = None,
        blames: Mapping[str, int] | None = None,
    ) -> None:
        self._rules = rules or PickerRules()
        self._rng = rng
        self._missing = set(missing)
        self._open = set(missing)
        others = {source.name: source for source in sources if source.name != me}
        traders = sorted({me, *(name for name, source in others.items() if source.kind == "peer")})
        mine = _from_share_of(me, traders, missing)
        self._share = set(mine[: -(-len(mine) // len(traders))])
        self._seeder_lacks: set[ChunkId] = set()
        self._states: dict[str, _State] = {}
        for name, source in others.items():
            order = _from_share_of(name, traders, missing) if source.kind == "peer" else mine
            state = _State(source, _Queue(), _Queue(), (blames or {}).get(name, 0))
            for chunk in order:
                self._enqueue(state, chunk)
            self._states[name] = state
        self._progress_at = self._peer_progress_at = now

    @property
    def missing(self) -> int:
        """Chunks that are not delivered yet."""
        return len(self._missing)

    def hopeless(self, now: float) -> bool:
        """Nothing more can be expected from anybody."""
        alone = all(state.gone for state in self._states.values())
        return bool(self._missing) and (alone or now >= self._progress_at + self._rules.give_up_s)

    def next(self, now: float) -> list[Assignment]:
        """All assignments that can be made now: peers first, the least blamed first among equals."""
        states = list(self._states.values())
        self._rng.shuffle(states)
        states.sort(key=lambda state: (_KINDS.index(state.source.kind), state.score))
        assignments = []
        for state in states:
            while state.free(now, self._rules.window) > 0 and (chunk := self._pick(state, now)):
                self._open.discard(chunk)
                state.asked[chunk] = now
                assignments.append(Assignment(state.source.name, chunk))
        return assignments

    def wake_at(self, now: float) -> float:
        """When `next` may have more to say although nothing was reported."""
        times = [self._progress_at + self._rules.give_up_s]
        times += [at + self._rules.overdue_s for state in self._states.values() for at in state.asked.values()]
        times += [state.paused_until for state in self._states.values() if not state.gone]
        times += [self._seeder_opens_at(), self._progress_at + self._rules.origin_patience_s]
        return min((time for time in times if time > now), default=now)

    def delivered(self, name: str, chunk: ChunkId, now: float) -> bool:
        """The chunk is verified and stored; says whether it was still missing."""
        state = self._states[name]
        state.asked.pop(chunk, None)
        state.pauses = state.strikes = 0
        is_new = chunk in self._missing
        self._missing.discard(chunk)
        self._open.discard(chunk)
        self._progress_at = now
        if state.source.kind == "peer":
            self._peer_progress_at = now
        return is_new

    def refused(self, name: str, chunk: ChunkId, reason: Reason, now: float) -> None:
        """The source answered without the chunk: leave it alone for a while, longer each time."""
        state = self._states[name]
        state.asked.pop(chunk, None)
        if state.source.kind == "seeder" and reason is Reason.ABSENT:
            self._seeder_lacks.add(chunk)
        self._reopen(chunk)
        if now >= state.paused_until:  # the other answers of the same burst say nothing new
            pause_s = min(self._rules.pause_s * 2**state.pauses, self._rules.pause_max_s)
            state.pauses += 1
            state.paused_until = now + self._jittered(pause_s)

    def failed(self, name: str, now: float) -> None:
        """The source is lost for now, and all that was asked of it is open again."""
        state = self._states[name]
        state.strikes += 1
        state.gone = state.gone or state.strikes >= self._rules.strikes_max
        state.paused_until = now + self._jittered(self._rules.failure_pause_s * 2 ** (state.strikes - 1))
        owed, state.asked = list(state.asked), {}
        for chunk in owed:
            self._reopen(chunk)

    def lied(self, name: str, now: float) -> None:
        """The source sent bytes that are not the chunk's: it is never asked again for this version."""
        self._states[name].gone = True
        self.failed(name, now)

    def _pick(self, state: _State, now: float) -> ChunkId | None:
        chunk = state.first.pop(self._open)
        if chunk is None and self._may_go_further(state, now):
            chunk = state.later.pop(self._open)
        return chunk or self._overdue(state, now)

    def _overdue(self, state: _State, now: float) -> ChunkId | None:
        """What another source has owed us for too long, the oldest first, unless two are asked already."""
        if state.source.kind == "origin" and not self._may_go_further(state, now):
            return None
        owed = [(at, chunk) for other in self._states.values() for chunk, at in other.asked.items()]
        times = Counter(chunk for _, chunk in owed)
        late = [(at, chunk) for at, chunk in owed if now >= at + self._rules.overdue_s and chunk in self._missing]
        candidates = [(at, chunk) for at, chunk in late if times[chunk] == 1 and chunk not in state.asked]
        return min(candidates)[1] if candidates else None

    def _may_go_further(self, state: _State, now: float) -> bool:
        """Whether the seeder may be asked beyond our share, and the origin for what others may still bring."""
        if state.source.kind == "seeder":
            return now >= self._seeder_opens_at() or not self._any_left("peer")
        return now >= self._progress_at + self._rules.origin_patience_s or not self._any_left("peer", "seeder")

    def _seeder_opens_at(self) -> float:
        busy = any(state.asked for state in self._states.values() if state.source.kind == "peer")
        return self._peer_progress_at + (self._rules.busy_patience_s if busy else self._rules.patience_s)

    def _any_left(self, *kinds: str) -> bool:
        return any(not state.gone and state.source.kind in kinds for state in self._states.values())

    def _reopen(self, chunk: ChunkId) -> None:
        if chunk in self._missing and not any(chunk in state.asked for state in self._states.values()):
            self._open.add(chunk)
            for state in self._states.values():
                self._enqueue(state, chunk)

    def _enqueue(self, state: _State, chunk: ChunkId) -> None:
        at_once = {"peer": True, "seeder": chunk in self._share, "origin": chunk in self._seeder_lacks}
        (state.first if at_once[state.source.kind] else state.later).push(chunk)

    def _jittered(self, seconds: float) -> float:
        return seconds * self._rng.uniform(0.75, 1.25)


_KINDS = ("peer", "seeder", "origin")


def _from_share_of(name: str, traders: Sequence[str], chunks: Sequence[ChunkId]) -> list[ChunkId]:
    """All chunks, beginning with the share of this node."""
    start = traders.index(name) * len(chunks) // len(traders)
    return [*chunks[start:], *chunks[:start]]
