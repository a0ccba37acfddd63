"""Which missing chunk to ask of whom: pure decisions; time and chance are arguments.

- The plan deals a version's chunks to stripes and names for each stripe the upstreams to ask first, its *parents*. A
  parent is asked in the order of the version even for chunks that it does not hold yet: those WANTs wait there, and the
  chunk comes the moment the parent has it.
- No part of the plan runs far ahead of the whole (`lead`): an uplink that has sent us our share is needed by others.
- Who would finish sooner takes over from who would finish later: a chunk whose parents fall behind is asked of a source
  that holds it and would end its own part earlier at its present pace, the rarest chunk first. A parent that stalls
  falls behind by itself, so work flows around slow, stalled and lost links, whatever the plan believed.
- In a large swarm a chunk has far to go: for as long as that takes by the plan nobody counts as late, and the seeder
  is asked beyond its part no more often than the plan allows.
- A WANT that could be answered and is not within `overdue_factor` times that source's usual time is asked of a second
  source. When a chunk comes, all other WANTs for it are taken back.
- The origin is the last resort: when the seeder lacks a chunk, when nothing came for `origin_patience_s`, and when no
  other source is left.
- A source that refused pauses; one that failed pauses, longer each time, and is given up after `strikes_max` failures
  without a delivery. One that lied is never asked again.
- Every chunk is delivered, or `hopeless` says that it never will be: no source is left, or none delivered anything
  for `give_up_s`.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from statistics import median

from protocol.frames import Reason
from protocol.ids import ChunkId
from swarm_node.plan_pace import PlanPace
from swarm_node.sources import Source, SourceState


@dataclass(frozen=True)
class Ask:
    """Ask this source for this chunk now."""

    source: str
    chunk: ChunkId


@dataclass(frozen=True)
class TakeBack:
    """The chunk came from elsewhere, or will sooner: cancel this WANT."""

    source: str
    chunk: ChunkId


@dataclass(frozen=True)
class PickerRules:
    """The numbers behind the rules above."""

    window: int = 2
    """Chunks that a source can send at once and was asked for: one under way, one behind it."""
    asked_max: int = 6
    waits: int = 4
    """Chunks that a parent was asked for and does not hold yet."""
    lead: float = 0.05
    """How far one source's part may be ahead of the whole, as a share of that part."""
    lead_chunks: int = 3
    ahead: float = 1.1
    """How many times sooner a source must be done to take over from another, and by how much at the least."""
    ahead_s: float = 0.3
    reluctance: float = 1.15
    """How many times later than usual a parent must be about to finish before the seeder, who feeds all, steps in."""
    slow: float = 1.2
    """A source that takes this many times longer to answer than the others do takes nothing over."""
    overdue_s: float = 3.0
    """At the least, before a second source is asked."""
    overdue_factor: float = 4.0
    sample: int = 8
    """Chunks looked at when one is chosen by chance."""
    outlook: int = 64
    """Planned chunks looked at when the next is chosen."""
    survey_s: float = 0.05
    look_s: float = 0.25
    """How often to look whether somebody has fallen behind."""
    origin_patience_s: float = 4.0
    pause_s: float = 0.05
    pause_max_s: float = 1.0
    failure_pause_s: float = 0.5
    strikes_max: int = 4
    give_up_s: float = 60.0


@dataclass(frozen=True)
class _Survey:
    """How the sources are doing altogether."""

    until: float = -math.inf
    """As long as it may be taken for the truth."""
    typical_s: float = 0.0
    """When those that work will be done with their parts."""
    usual_s: float = 0.0
    """How long peers take to answer."""
    late: Sequence[ChunkId] = ()
    """Chunks that somebody should have answered by now, the oldest WANT first."""


class Picker:
    """The state of fetching one version: `next` decides, the other verbs report what became of it."""

    def __init__(
        self,
        chunks: Sequence[ChunkId],
        missing: Iterable[ChunkId],
        sources: Iterable[Source],
        *,
        rng: Random,
        now: float,
        stripes: int = 1,
        rules: PickerRules | None = None,
        blames: Mapping[str, int] | None = None,
        pace: PlanPace | None = None,
    ) -> None:
        self._rules = rules or PickerRules()
        self._pace = pace or PlanPace()
        self._help_at = now + rng.uniform(0, self._pace.help_s)
        self._patient_until = now + self._pace.lag_s
        self._rng = rng
        self._missing = set(missing)
        self._initial = max(1, len(self._missing))
        self._askers: dict[ChunkId, set[str]] = {chunk: set() for chunk in self._missing}
        self._unasked = dict.fromkeys(chunk for chunk in chunks if chunk in self._missing)
        self._copies: Counter[ChunkId] = Counter()
        """How many peers said that they hold a chunk."""
        self._states = {source.name: SourceState(source, (blames or {}).get(source.name, 0)) for source in sources}
        self._parents: dict[ChunkId, list[SourceState]] = {}
        self._plan(chunks, stripes)
        self._withdrawn: list[TakeBack] = []
        self._survey = _Survey()
        self._progress_at = now

    def _plan(self, chunks: Sequence[ChunkId], stripes: int) -> None:
        of_stripe: dict[int, list[SourceState]] = {}
        for state in self._states.values():
            for stripe in state.source.stripes:
                of_stripe.setdefault(stripe, []).append(state)
        for place, chunk in enumerate(chunks):
            if chunk in self._missing:
                self._parents[chunk] = of_stripe.get(place % stripes, [])
                for state in self._parents[chunk]:
                    state.planned.append(chunk)
                    state.total += 1
                    state.backlog += 1

    @property
    def missing(self) -> int:
        """Chunks that are not delivered yet."""
        return len(self._missing)

    def busy_s(self, name: str) -> float | None:
        """How long a source was sending us something, as far as that can be told."""
        return self._states[name].busy_s

    def hopeless(self, now: float) -> bool:
        """Nothing more can be expected from anybody."""
        alone = all(state.gone for state in self._states.values())
        return bool(self._missing) and (alone or now >= self._progress_at + self._rules.give_up_s)

    def next(self, now: float) -> list[Ask | TakeBack]:
        """Everything that is to be asked or taken back now: peers first, the least blamed first among equals."""
        if now >= self._survey.until:
            self._survey = self._look_around(now)
        states = [state for state in self._states.values() if not state.gone and now >= state.paused_until]
        self._rng.shuffle(states)
        states.sort(key=lambda state: (_KINDS.index(state.source.kind), state.blames))
        asks = []
        for state in states:
            while chunk := self._choose(state, now):
                asks.append(self._ask(state, chunk, now))
        taken_back, self._withdrawn = self._withdrawn, []
        return [*taken_back, *asks]

    def wake_at(self, now: float) -> float:
        """When `next` may have more to say although nothing was reported."""
        return now + self._rules.look_s

    def had(self, name: str, chunks: Iterable[ChunkId], now: float) -> bool:
        """A peer says that it holds these; says whether that could change what it does now."""
        state = self._states[name]
        for chunk in chunks:
            if chunk in self._missing and chunk not in state.has:
                state.has.add(chunk)
                self._copies[chunk] += 1
                if chunk in state.asked:
                    state.asked[chunk] = now
                self._offer(state, chunk)
        return state.ready < self._rules.window

    def delivered(self, name: str, chunk: ChunkId, now: float) -> bool:
        """The chunk is verified and stored; says whether it was still missing."""
        self._states[name].settle(chunk, now)
        self._progress_at = now
        if chunk not in self._missing:
            return False
        self._missing.discard(chunk)
        self._unasked.pop(chunk, None)
        for other in self._askers.pop(chunk) - {name}:
            self._take_back(other, chunk)
        del self._copies[chunk]
        for state in self._states.values():
            state.has.discard(chunk)
        for parent in self._parents[chunk]:
            parent.backlog -= 1
        return True

    def refused(self, name: str, chunk: ChunkId, reason: Reason, now: float) -> None:
        """The source answered without the chunk: leave it alone for a while, longer each time."""
        state = self._states[name]
        state.asked.pop(chunk, None)
        state.taken_back.discard(chunk)
        if reason is Reason.ABSENT:
            if chunk in state.has:
                state.has.discard(chunk)
                self._copies[chunk] -= 1
            if state.holds_all:
                state.lacks.add(chunk)
        self._reopen(chunk, name)
        if reason is Reason.CANCELLED:
            state.owing_since = state.owing_since if state.asked else None
        elif now >= state.paused_until:  # not for each answer of one burst
            pause_s = min(self._rules.pause_s * 2**state.pauses, self._rules.pause_max_s)
            state.pauses += 1
            state.paused_until = now + self._jittered(pause_s)

    def failed(self, name: str, now: float) -> None:
        """The source is lost for now, and all that was asked of it is open again."""
        state = self._states[name]
        state.strikes += 1
        state.gone = state.gone or state.strikes >= self._rules.strikes_max
        state.paused_until = now + self._jittered(self._rules.failure_pause_s * 2 ** (state.strikes - 1))
        owed = list(state.asked)
        self._copies.subtract(state.has)
        for forgotten in (state.asked, state.taken_back, state.has, state.offers, state.extras):
            forgotten.clear()
        for chunk in owed:
            self._reopen(chunk, name)

    def lied(self, name: str, now: float) -> None:
        """The source sent bytes that are not the chunk's: it is never asked again for this version."""
        self._states[name].gone = True
        self.failed(name, now)

    def _look_around(self, now: float) -> _Survey:
        states = self._states.values()
        working = [state.done_in_s(now) for state in states if state.interval_s and not state.gone]
        usual = [state.usual_s for state in states if state.usual_s and state.source.kind == "peer"]
        usual_s = sum(usual) / len(usual) if usual else 0.0
        late = []
        for state in states:
            usually_s = state.usual_s or usual_s or self._pace.hop_s
            patience_s = max(self._rules.overdue_s, self._rules.overdue_factor * usually_s)
            late += [(since, chunk) for chunk, since in state.asked.items() if now >= since + patience_s]
        typical_s = median(working) if working else 0.0
        return _Survey(now + self._rules.survey_s, typical_s, usual_s, [chunk for _, chunk in sorted(late)])

    def _choose(self, state: SourceState, now: float) -> ChunkId | None:
        """The next chunk to ask of this source."""
        on_pace = self._is_on_pace(state)
        if state.ready < self._rules.window:
            chunk = self._next_planned(state) if state.holds_all else self._rarest(state.offers)
            if chunk and on_pace:
                return chunk
            if chunk := self._taken_over(state, now) or self._overdue(state, now):
                return chunk
        may_wait = len(state.asked) - state.ready < self._rules.waits and len(state.asked) < self._rules.asked_max
        if on_pace and may_wait and not state.holds_all:
            return self._next_planned(state)
        return None

    def _ask(self, state: SourceState, chunk: ChunkId, now: float) -> Ask:
        for name in self._askers[chunk]:
            if self._states[name].asked.get(chunk) == math.inf:
                self._take_back(name, chunk)
        self._unasked.pop(chunk, None)
        self._askers[chunk].add(state.source.name)
        if state.owing_since is None:
            state.owing_since = max(now, self._patient_until)
        state.asked[chunk] = now if state.can_answer(chunk) else math.inf
        return Ask(state.source.name, chunk)

    def _take_back(self, name: str, chunk: ChunkId) -> None:
        if chunk not in self._states[name].taken_back:
            self._states[name].taken_back.add(chunk)
            self._withdrawn.append(TakeBack(name, chunk))

    def _is_on_pace(self, state: SourceState) -> bool:
        begun = state.total - state.backlog + len(state.asked)
        whole = 1.0 - len(self._missing) / self._initial
        return begun <= whole * state.total + max(self._rules.lead_chunks, self._rules.lead * state.total)

    def _next_planned(self, state: SourceState) -> ChunkId | None:
        while state.planned and state.planned[0] not in self._missing:
            state.planned.popleft()
        nearest = islice(state.planned, self._rules.outlook)
        skipped = state.lacks if state.holds_all else state.has
        return next((chunk for chunk in nearest if chunk in self._unasked and chunk not in skipped), None)

    def _rarest(self, offers: list[ChunkId]) -> ChunkId | None:
        """Of a few that nobody was asked for, drawn by chance, the chunk that the fewest hold."""
        found = self._draw(offers, self._unasked.__contains__)
        return min(found, key=self._copies.__getitem__) if found else None

    def _taken_over(self, state: SourceState, now: float) -> ChunkId | None:
        """A chunk whose parents would be done much later than this source, and later than parents usually are."""
        if state.source.kind == "origin" and not self._needs_origin(now):
            return self._lacking_elsewhere(state)
        if now < state.look_again_at or (state.source.kind == "seeder" and now < self._help_at):
            return None
        late_s = self._late_s(state, now)

        def behind_s(chunk: ChunkId) -> float:
            return min((parent.done_in_s(now) for parent in self._parents[chunk]), default=math.inf)

        def fits(chunk: ChunkId) -> bool:
            return self._only_waits(chunk) and state.can_answer(chunk) and behind_s(chunk) > late_s

        if state.source.kind == "peer":
            found = self._draw(state.extras, fits)
        else:
            pool = list(self._unasked or self._missing)
            found = [chunk for chunk in self._rng.sample(pool, min(len(pool), self._rules.sample)) if fits(chunk)]
        if not found:
            state.look_again_at = now + self._rules.look_s
            return None
        if state.source.kind == "seeder":
            self._help_at = now + self._pace.help_s
        return min(found, key=lambda chunk: (self._copies[chunk], -behind_s(chunk)))

    def _late_s(self, helper: SourceState, now: float) -> float:
        """How late a chunk's parents must be for this source to help: a slow one should not, the seeder reluctantly."""
        rules, survey = self._rules, self._survey
        ahead_s = rules.ahead_s + self._pace.lag_s
        if now >= self._progress_at + ahead_s:
            return -1.0  # nobody delivers anything
        own_s = rules.ahead * helper.done_in_s(now) + ahead_s
        if helper.source.kind != "peer":
            return max(own_s, rules.reluctance * survey.typical_s + ahead_s)
        if survey.usual_s and helper.usual_s > rules.slow * survey.usual_s:
            return math.inf
        return max(own_s, survey.typical_s)

    def _only_waits(self, chunk: ChunkId) -> bool:
        """Nobody who could answer was asked for it."""
        return all(self._states[name].asked.get(chunk) == math.inf for name in self._askers[chunk])

    def _overdue(self, helper: SourceState, now: float) -> ChunkId | None:
        """What one other source should have answered by now, the oldest first."""
        if helper.source.kind == "origin" and not self._needs_origin(now):
            return None
        found = (chunk for chunk in self._survey.late if chunk not in helper.asked and helper.can_answer(chunk))
        return next((chunk for chunk in found if len(self._askers.get(chunk, ())) == 1), None)

    def _needs_origin(self, now: float) -> bool:
        others = (state for state in self._states.values() if state.source.kind != "origin")
        patience_s = self._rules.origin_patience_s + self._pace.lag_s
        return now >= self._progress_at + patience_s or all(state.gone for state in others)

    def _lacking_elsewhere(self, origin: SourceState) -> ChunkId | None:
        """What the seeder does not hold, and so nobody will."""
        lacks = [state.lacks for state in self._states.values() if state.source.kind == "seeder" and not state.gone]
        found = [chunk for chunk in lacks[0] if chunk in self._unasked and origin.can_answer(chunk)] if lacks else []
        return found[0] if found else None

    def _draw(self, offers: list[ChunkId], fits: Callable[[ChunkId], bool]) -> list[ChunkId]:
        """A few that fit, by chance; of what was looked at, those that are not missing leave the list."""
        found: list[ChunkId] = []
        for _ in range(min(self._rules.sample, len(offers))):
            place = self._rng.randrange(len(offers))
            chunk = offers[place]
            if chunk not in self._missing:
                offers[place] = offers[-1]
                offers.pop()
            elif fits(chunk):
                found.append(chunk)
        return found

    def _offer(self, state: SourceState, chunk: ChunkId) -> None:
        (state.offers if state in self._parents[chunk] else state.extras).append(chunk)

    def _reopen(self, chunk: ChunkId, name: str) -> None:
        """One asker less; with none left the chunk is up for anybody."""
        if chunk in self._missing:
            self._askers[chunk].discard(name)
            if not self._askers[chunk]:
                self._unasked[chunk] = None

    def _jittered(self, seconds: float) -> float:
        return seconds * self._rng.uniform(0.75, 1.25)


_KINDS = ("peer", "seeder", "origin")
