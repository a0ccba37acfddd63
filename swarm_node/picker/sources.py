"""State of one source of chunks while a version is fetched: the chunks it holds and owes, and its pace.

- Only the picker changes this state and decides by it; times are the caller's clock.

Numbers of the picker's rules, and the timing of a plan; units are seconds, chunks and factors.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal, Self

from protocol.ids import ChunkId


@dataclass(frozen=True)
class PickerRules:
    """Numbers of the picker's rules."""

    window: int = 2
    """Outstanding chunks that a source can send: one under way, one behind it."""
    window_max: int = 8
    """Upper limit of the window, which grows by 1 when a link is idle between two chunks."""
    gap: float = 0.1
    """Pause that counts as idle, as a share of the usual time between two chunks."""
    fluent: int = 16
    """Chunks without such a gap, after which the window shrinks by 1."""
    waits: int = 4
    """Outstanding chunks that a parent does not hold yet."""
    behind: float = 0.02
    """Share of the chunks missing at the start: a node that is behind others by more asks every source."""
    behind_chunks: int = 3
    ahead: float = 1.1
    """Factor by which a source must finish sooner to take over from another; `ahead_s` is the smallest difference."""
    ahead_s: float = 0.3
    slow: float = 1.2
    """A source whose answers take longer than the others' by this factor takes nothing over."""
    confirm_s: float = 2.0
    """Longest wait for the confirmation of a CANCEL."""
    overdue_s: float = 3.0
    """Shortest time before a second source is asked."""
    overdue_factor: float = 4.0
    last_overdue_s: float = 0.5
    last_overdue_factor: float = 1.5
    """The factor once every chunk is requested: from then on links are idle."""
    silence_s: float = 0.6
    """Shortest silence before a source loses its turn: longer than the pause between HAVEs, and than a lost packet on a
    usual link."""
    sample: int = 8
    """Chunks considered in a random choice."""
    outlook: int = 64
    """Planned chunks of the seeder among which the next is chosen."""
    survey_s: float = 0.05
    look_s: float = 0.25
    """Interval of the check whether a source has fallen behind."""
    first_word_s: float = 1.0
    """Shortest time for a source to deliver its first chunk before it counts as mute."""
    origin_patience_s: float = 4.0
    pause_s: float = 0.05
    pause_max_s: float = 1.0
    failure_pause_s: float = 0.5
    failure_pause_max_s: float = 10.0
    """A parent that restarts is back soon; a thousand children make 100 tries per second meanwhile."""
    strikes_max: int = 4
    give_up_s: float = 60.0


HOP_MAX_S = 30.0
"""Upper limit of `hop_s`, for plans that assume slower links."""


@dataclass(frozen=True)
class PlanPace:
    """Timing of a plan, for chunks of one size; without a plan there is no lag, and the seeder helps freely."""

    hop_s: float = 0.0
    """Time for a chunk to pass one uplink of its tree, at the rate of one stripe; 0 in a small swarm."""
    lag_s: float = 0.0
    """Additional travel time of a chunk compared with a small swarm, where no node is more than two uplinks away."""
    help_s: float = 0.0
    """Pause between two chunks requested from the seeder beyond its part."""

    @classmethod
    def from_plan(cls, chunk_bytes: int, *, stripes: int, rate: float, hops: int, help_rate: float) -> Self:
        """Compute the timing from a plan's numbers, for chunks of `chunk_bytes`."""
        hop_s = min(chunk_bytes * stripes / rate, HOP_MAX_S) if rate and hops > 2 else 0.0
        return cls(hop_s, max(0, hops - 2) * hop_s, chunk_bytes / help_rate if help_rate else 0.0)


ORIGIN = "origin"
"""The name of the source that is not a node."""

_KINDS = ("peer", "seeder", "origin")
"""Kinds of sources in the order in which they are asked."""


@dataclass(frozen=True)
class ChunkSource:
    """A node or the origin, which may have chunks; `name` is a node id, or `ORIGIN`."""

    name: str
    kind: Literal["peer", "seeder", "origin"]
    stripes: Collection[int] = ()
    """The stripes of which it is a parent."""


@dataclass
class AnswerTimes:
    """The usual answer time of a source and its deviation, smoothed as TCP does for its timeout (RFC 6298)."""

    count: int = 0
    mean_s: float = 0.0
    deviation_s: float = 0.0

    def add(self, answer_s: float) -> None:
        """Record one answer."""
        if self.count:
            self.deviation_s += (abs(self.mean_s - answer_s) - self.deviation_s) / 4
            self.mean_s += (answer_s - self.mean_s) / 8
        else:
            self.mean_s, self.deviation_s = answer_s, answer_s / 2
        self.count += 1

    def patience_s(self, least_s: float) -> float:
        """Return the allowed silence of the source, in seconds."""
        return max(least_s, self.mean_s + 4 * self.deviation_s)


@dataclass(eq=False)
class SourceState:
    """State of one source."""

    source: ChunkSource
    blames: int
    window: int
    """Limit of outstanding chunks that it can send now."""
    fluent: int = 0
    """Number of chunks that began without a gap, since the last gap."""
    planned: dict[ChunkId, None] = field(default_factory=dict)
    """Missing chunks of its part, in the version's order; for a peer, those that it does not hold yet."""
    backlog: int = 0
    """Number of missing chunks in its part."""
    has: set[ChunkId] = field(default_factory=set)
    """Missing chunks that it announced."""
    told: int = 0
    """Announced chunks among all chunks missing at the start, one bit each."""
    offers: list[ChunkId] = field(default_factory=list)
    """Announced chunks of its part, for a random choice; may contain chunks requested meanwhile."""
    extras: list[ChunkId] = field(default_factory=list)
    """Announced chunks outside its part."""
    lacks: dict[ChunkId, None] = field(default_factory=dict)
    """Chunks that it does not hold, although such a source should hold everything."""
    asked: dict[ChunkId, float] = field(default_factory=dict)
    """Chunks that it owes, with the time since which it can answer (`inf`: it does not have the chunk yet)."""
    ready: int = 0
    """Number of owed chunks that it can send now."""
    begun: dict[ChunkId, float] = field(default_factory=dict)
    """Owed chunks of which the first bytes have arrived, with the time."""
    taken_back: set[ChunkId] = field(default_factory=set)
    """Owed chunks that were cancelled; the answer may still arrive."""
    reserved: dict[ChunkId, float] = field(default_factory=dict)
    """Chunks to request from it once others confirm that they do not send them, with the time."""
    usual_s: float = 0.0
    """Smoothed time from when it could answer to the answer."""
    answers: AnswerTimes = field(default_factory=AnswerTimes)
    """The answer times that set the allowed silence."""
    word_at: float = -math.inf
    heard_s: float = 0.0
    fell_silent: bool = False
    """Time of its last message on the caller's clock and on that of `Hearing`, and whether that is too long ago."""
    delivered: int = 0
    timed: int = 0
    timed_s: float = 0.0
    """Number of deliveries; number of those with a known start (it held the chunk, announced it, or its first bytes
    were seen); the time they took."""
    settled_at: float = -math.inf
    interval_s: float = 0.0
    """Smoothed time between two deliveries while it owes chunks."""
    owing_since: float | None = None
    """Time since which it could have delivered a chunk; refusals and failures do not reset it."""
    look_again_at: float = -math.inf
    """Time of the next search for work that it could take over, after a search without result."""
    paused_until: float = -math.inf
    pause_s: float = 0.0
    failure_pause_s: float = 0.0
    """Last pauses since its last delivery: after a refusal, and after a failure."""
    strikes: int = 0
    """Failures since its last delivery."""
    down: bool = False
    """True after too many failures: it is not relied on until it delivers."""
    lost: bool = False
    """True if its exchange ended, or it left the plan, and it has announced nothing since."""
    gone: bool = False
    """True if it lied."""

    def __post_init__(self) -> None:
        self.holds_all = self.source.kind != "peer"
        self.rank = (_KINDS.index(self.source.kind), self.blames)
        """Sort key: peers first, and the least blamed first."""

    def is_able(self, now: float) -> bool:
        """Return True if it neither pauses nor has lied."""
        return not self.gone and now >= self.paused_until

    @property
    def is_out(self) -> bool:
        """True if it is not relied on."""
        return self.gone or self.down or self.paused_until == math.inf

    @property
    def is_failing(self) -> bool:
        """True if it failed since its last delivery."""
        return self.is_out or self.strikes > 0

    @property
    def is_silent(self) -> bool:
        """True if it owes a chunk and was silent for too long: others are asked first."""
        return self.fell_silent and bool(self.asked)

    @property
    def owes_word(self) -> bool:
        """True if it was asked for a chunk that it can send, or was sent a CANCEL."""
        return self.source.kind != "origin" and (self.ready > 0 or bool(self.taken_back))

    def plan(self, part: Collection[ChunkId]) -> None:
        """Set its part to these missing chunks."""
        self.backlog = len(part)
        self.planned = dict.fromkeys(chunk for chunk in part if self.holds_all or chunk not in self.has)
        self.offers = [chunk for chunk in part if chunk in self.has]
        self.extras = list(self.has.difference(part))

    def join(self, source: ChunkSource) -> None:
        """Apply a plan that names it, perhaps with other stripes; its pause ends."""
        self.source, self.paused_until = source, -math.inf

    def leave(self) -> None:
        """Apply a plan that does not name it any more."""
        self.source = replace(self.source, stripes=())
        self.paused_until, self.lost = math.inf, True

    def owe(self, chunk: ChunkId, since: float) -> None:
        """Record a request, or that it can answer from `since` on."""
        self.ready += (since < math.inf) - (self.asked.get(chunk, math.inf) < math.inf)
        self.asked[chunk] = since

    def release(self, chunk: ChunkId) -> float:
        """Remove an owed chunk; return the time since which the source could answer."""
        since = self.asked.pop(chunk, math.inf)
        self.ready -= since < math.inf
        self.taken_back.discard(chunk)
        return since

    def lack(self, chunk: ChunkId) -> None:
        """Record that it does not hold a chunk; other chunks of its part are requested first."""
        if self.holds_all:
            self.lacks[chunk] = None
        elif chunk in self.planned:
            self.planned[chunk] = self.planned.pop(chunk)

    def can_answer(self, chunk: ChunkId) -> bool:
        return chunk in self.has or (self.holds_all and chunk not in self.lacks)

    def is_late(self, chunk: ChunkId, patience_s: float, now: float) -> bool:
        """Return True if it owes this chunk and could answer for `patience_s`, but nothing has arrived since."""
        since = max(self.asked[chunk], self.begun.get(chunk, -math.inf))
        return chunk not in self.taken_back and now >= since + patience_s

    def to_come(self, unasked: Collection[ChunkId]) -> Iterator[ChunkId]:
        """Yield the chunks of its part that are not requested, in the version's order."""
        return (c for c in self.planned if c in unasked and c not in self.lacks and c not in self.asked)

    def done_in_s(self, now: float) -> float:
        """Return the time until its part of the plan is delivered at its current pace."""
        if self.is_out or self.is_silent:
            return math.inf
        silence_s = now - self.owing_since if self.owing_since is not None else 0.0
        return self.backlog * max(self.interval_s, silence_s)

    @property
    def busy_s(self) -> float | None:
        """Time for which it was sending, in seconds; None if unknown."""
        return self.timed_s * self.delivered / self.timed if self.timed else None

    def forget(self) -> list[ChunkId]:
        """Clear the state of a lost source; return the chunks that it owed."""
        owed = list(self.asked)
        for forgotten in (self.asked, self.begun, self.taken_back, self.has, self.offers, self.extras):
            forgotten.clear()
        self.ready = self.told = 0
        self.lost, self.fell_silent = True, False
        return owed

    def pause(self, now: float, rules: PickerRules, rng: Random) -> None:
        """Pause a source that has nothing to send now, longer each time."""
        self.pause_s = min(2 * self.pause_s or rules.pause_s, rules.pause_max_s)
        self.paused_until = now + self.pause_s * rng.uniform(0.75, 1.25)

    def strike(self, now: float, rules: PickerRules, rng: Random) -> None:
        """Record a failure and pause, longer each time; after too many in a row it is `down`."""
        self.strikes += 1
        self.down = self.strikes >= rules.strikes_max
        self.failure_pause_s = min(2 * self.failure_pause_s or rules.failure_pause_s, rules.failure_pause_max_s)
        self.paused_until = now + self.failure_pause_s * rng.uniform(0.75, 1.25)

    def begin(self, chunk: ChunkId, now: float, rules: PickerRules) -> None:
        """Record the first bytes of a chunk; widen the window if the link was idle before although a WANT was open."""
        if self.begun or self.asked[chunk] < self.settled_at:
            idle_s = 0.0 if self.begun else now - self.settled_at
            self.fluent = self.fluent + 1 if idle_s <= rules.gap * self.interval_s else 0
            if not self.fluent:
                self.window = min(self.window + 1, rules.window_max)
            elif self.fluent % rules.fluent == 0:
                self.window = max(self.window - 1, rules.window)
        self.begun[chunk] = now
        self.taken_back.discard(chunk)

    def settle(self, chunk: ChunkId, now: float) -> None:
        """Record a delivery and its pace."""
        since = self.release(chunk)
        begun = self.begun.pop(chunk, since)
        self.delivered += 1
        if since < math.inf:
            self.usual_s = _smoothed(self.usual_s, now - since)
            self.answers.add(now - since)
            self.timed += 1
            self.timed_s += now - max(begun, self.settled_at)
        self.settled_at = now
        if self.owing_since is not None:
            self.interval_s = _smoothed(self.interval_s, now - self.owing_since)
        self.owing_since = now if self.asked else None
        self.pause_s = self.failure_pause_s = 0.0
        self.strikes, self.down = 0, False


def deal(
    chunks: Iterable[ChunkId], missing: Collection[ChunkId], states: Collection[SourceState], stripes: int
) -> dict[ChunkId, list[SourceState]]:
    """Assign each source its part of the missing chunks; return the parents of each chunk."""
    of_stripe: dict[int, list[SourceState]] = {}
    for state in states:
        for stripe in state.source.stripes:
            of_stripe.setdefault(stripe, []).append(state)
    parents = {chunk: of_stripe.get(place % stripes, []) for place, chunk in enumerate(chunks) if chunk in missing}
    parts: dict[str, list[ChunkId]] = {state.source.name: [] for state in states}
    for chunk, parents_of_it in parents.items():
        for state in parents_of_it:
            parts[state.source.name].append(chunk)
    for state in states:
        state.plan(parts[state.source.name])
    return parents


def sample_fitting(
    offers: list[ChunkId],
    held: Collection[ChunkId],
    fits: Callable[[ChunkId], bool],
    *,
    most: int,
    rng: Random,
) -> list[ChunkId]:
    """Return a few random offers that fit; drawn chunks that are not in `held` are removed from `offers`."""
    fitting: list[ChunkId] = []
    for _ in range(min(most, len(offers))):
        place = int(len(offers) * rng.random())
        chunk = offers[place]
        if chunk not in held:
            offers[place] = offers[-1]
            offers.pop()
        elif fits(chunk):
            fitting.append(chunk)
    return fitting


def _smoothed(before: float, now: float) -> float:
    return 0.8 * before + 0.2 * now if before else now
