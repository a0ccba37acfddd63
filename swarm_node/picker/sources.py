"""What is known about one source of chunks while a version is fetched: what it holds, what it owes us, its pace.

- Only the picker changes these, and decides by them; times are the caller's clock.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal

from protocol.ids import ChunkId
from swarm_node.picker.rules import PickerRules

ORIGIN = "origin"
"""The name of the source that is not a node."""

_KINDS = ("peer", "seeder", "origin")
"""The first are asked first."""


@dataclass(frozen=True)
class ChunkSource:
    """Somebody who may have chunks; `name` is a node id, or `ORIGIN`."""

    name: str
    kind: Literal["peer", "seeder", "origin"]
    stripes: Collection[int] = ()
    """The stripes that it is asked for first."""


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
        """Return how long the source may be silent."""
        return max(least_s, self.mean_s + 4 * self.deviation_s)


@dataclass(eq=False)
class SourceState:
    """What the picker knows about one source."""

    source: ChunkSource
    blames: int
    window: int
    """How many chunks that it could send at once it is asked for."""
    fluent: int = 0
    """How many of them began right after the one before, since the last that did not."""
    planned: dict[ChunkId, None] = field(default_factory=dict)
    """What it is asked for first and is missing, in the version's order; of a peer's, what it does not hold yet."""
    backlog: int = 0
    """How many of the chunks that are planned of it are missing."""
    has: set[ChunkId] = field(default_factory=set)
    """Missing chunks that it said it holds."""
    told: int = 0
    """What it said it holds, of all that was missing here at the start: a bit for each."""
    offers: list[ChunkId] = field(default_factory=list)
    """The planned ones of these, for a choice by chance; may name chunks that are asked for meanwhile."""
    extras: list[ChunkId] = field(default_factory=list)
    """The others of these."""
    lacks: dict[ChunkId, None] = field(default_factory=dict)
    """What it does not hold, of a source that should hold everything."""
    asked: dict[ChunkId, float] = field(default_factory=dict)
    """What it owes us, and since when it could have answered (`inf`: it waits for the chunk itself)."""
    ready: int = 0
    """How many of them it could send now."""
    begun: dict[ChunkId, float] = field(default_factory=dict)
    """Those of them of which something is here, and since when."""
    taken_back: set[ChunkId] = field(default_factory=set)
    """Those of them that are not needed any more; the answer may still come."""
    reserved: dict[ChunkId, float] = field(default_factory=dict)
    """What it shall be asked for once others confirm that they do not send it, and since when."""
    usual_s: float = 0.0
    """From the moment it could answer to the answer, smoothed."""
    answers: AnswerTimes = field(default_factory=AnswerTimes)
    """The same times, for how long it may be silent."""
    word_at: float = -math.inf
    heard_s: float = 0.0
    fell_silent: bool = False
    """Its last word, on the caller's clock and on that of `Hearing`, and whether that is too long ago."""
    delivered: int = 0
    timed: int = 0
    timed_s: float = 0.0
    """Deliveries; those that it held when asked, or said so since, or of which we saw the first bytes; their time."""
    settled_at: float = -math.inf
    interval_s: float = 0.0
    """Between two deliveries while it owes us something, smoothed."""
    owing_since: float | None = None
    """Since when it could have delivered something; refusals and failures do not settle that."""
    look_again_at: float = -math.inf
    """When to look again for work that it could take over: there was none the last time."""
    paused_until: float = -math.inf
    pause_s: float = 0.0
    failure_pause_s: float = 0.0
    """The last ones since it delivered: after a refusal, and after a failure."""
    strikes: int = 0
    """Failures since it delivered."""
    down: bool = False
    """They are so many that nobody counts on it until it delivers."""
    lost: bool = False
    """Its exchange ended, or it left the plan, and it has not said since what it holds."""
    gone: bool = False
    """It lied."""

    def __post_init__(self) -> None:
        self.holds_all = self.source.kind != "peer"
        self.rank = (_KINDS.index(self.source.kind), self.blames)
        """Who is asked first: peers, and the least blamed."""

    def is_able(self, now: float) -> bool:
        """It neither pauses nor has lied."""
        return not self.gone and now >= self.paused_until

    @property
    def is_out(self) -> bool:
        """Nobody counts on it."""
        return self.gone or self.down or self.paused_until == math.inf

    @property
    def is_failing(self) -> bool:
        """It failed since it last delivered."""
        return self.is_out or self.strikes > 0

    @property
    def is_silent(self) -> bool:
        """It owes something and has not said a word for too long: others are asked first."""
        return self.fell_silent and bool(self.asked)

    @property
    def owes_word(self) -> bool:
        """It was asked for something that it can send, or was sent a CANCEL."""
        return self.source.kind != "origin" and (self.ready > 0 or bool(self.taken_back))

    def plan(self, part: Collection[ChunkId]) -> None:
        """These missing chunks are its part."""
        self.backlog = len(part)
        self.planned = dict.fromkeys(chunk for chunk in part if self.holds_all or chunk not in self.has)
        self.offers = [chunk for chunk in part if chunk in self.has]
        self.extras = list(self.has.difference(part))

    def join(self, source: ChunkSource) -> None:
        """A plan names it, perhaps with other stripes: whatever it failed at, it is worth another try now."""
        self.source, self.paused_until = source, -math.inf

    def leave(self) -> None:
        """The plan does not name it any more."""
        self.source = replace(self.source, stripes=())
        self.paused_until, self.lost = math.inf, True

    def owe(self, chunk: ChunkId, since: float) -> None:
        """It was asked for a chunk, or can answer from now on."""
        self.ready += (since < math.inf) - (self.asked.get(chunk, math.inf) < math.inf)
        self.asked[chunk] = since

    def release(self, chunk: ChunkId) -> float:
        """It does not owe a chunk any more; since when it could have answered."""
        since = self.asked.pop(chunk, math.inf)
        self.ready -= since < math.inf
        self.taken_back.discard(chunk)
        return since

    def lack(self, chunk: ChunkId) -> None:
        """It does not hold a chunk: of its part, it is asked for the others first."""
        if self.holds_all:
            self.lacks[chunk] = None
        elif chunk in self.planned:
            self.planned[chunk] = self.planned.pop(chunk)

    def can_answer(self, chunk: ChunkId) -> bool:
        return chunk in self.has or (self.holds_all and chunk not in self.lacks)

    def is_late(self, chunk: ChunkId, patience_s: float, now: float) -> bool:
        """It still owes this chunk, could answer for so long, and nothing of it has begun to come since."""
        since = max(self.asked[chunk], self.begun.get(chunk, -math.inf))
        return chunk not in self.taken_back and now >= since + patience_s

    def to_come(self, unasked: Collection[ChunkId]) -> Iterator[ChunkId]:
        """Of its part, what nobody was asked for, in the order of the version."""
        return (c for c in self.planned if c in unasked and c not in self.lacks and c not in self.asked)

    def done_in_s(self, now: float) -> float:
        """Until its part of the plan is delivered, at its present pace."""
        if self.is_out or self.is_silent:
            return math.inf
        silence_s = now - self.owing_since if self.owing_since is not None else 0.0
        return self.backlog * max(self.interval_s, silence_s)

    @property
    def busy_s(self) -> float | None:
        """How long it was sending us something, as far as that can be told."""
        return self.timed_s * self.delivered / self.timed if self.timed else None

    def forget(self) -> list[ChunkId]:
        """It is lost: it owes nothing, and holds nothing that can be had; says what it owed."""
        owed = list(self.asked)
        for forgotten in (self.asked, self.begun, self.taken_back, self.has, self.offers, self.extras):
            forgotten.clear()
        self.ready = self.told = 0
        self.lost, self.fell_silent = True, False
        return owed

    def pause(self, now: float, rules: PickerRules, rng: Random) -> None:
        """It has nothing for us now: leave it alone for a moment, longer each time."""
        self.pause_s = min(2 * self.pause_s or rules.pause_s, rules.pause_max_s)
        self.paused_until = now + self.pause_s * rng.uniform(0.75, 1.25)

    def strike(self, now: float, rules: PickerRules, rng: Random) -> None:
        """It failed: leave it alone, longer each time; after too many failures in a row nobody counts on it."""
        self.strikes += 1
        self.down = self.strikes >= rules.strikes_max
        self.failure_pause_s = min(2 * self.failure_pause_s or rules.failure_pause_s, rules.failure_pause_max_s)
        self.paused_until = now + self.failure_pause_s * rng.uniform(0.75, 1.25)

    def begin(self, chunk: ChunkId, now: float, rules: PickerRules) -> None:
        """The first bytes of a chunk are here; if they were waited for although asked for in time, ask for more."""
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
        """It delivered: note its pace."""
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
    """Tell everybody his part of what is missing; who is asked first for each of these chunks."""
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
    """A few that fit, by chance; of what was looked at, what the source does not hold, or is here, leaves the list."""
    found: list[ChunkId] = []
    for _ in range(min(most, len(offers))):
        place = int(len(offers) * rng.random())
        chunk = offers[place]
        if chunk not in held:
            offers[place] = offers[-1]
            offers.pop()
        elif fits(chunk):
            found.append(chunk)
    return found


def _smoothed(before: float, now: float) -> float:
    return 0.8 * before + 0.2 * now if before else now
