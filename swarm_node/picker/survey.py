"""How all sources of a version are doing at one moment: how fast they answer, what they hold, what is overdue.

The last resorts are the origin and giving up:

- The origin is the last resort: for what the seeder lacks, when nothing comes (`origin_patience_s`), or where there is
  nobody else to count on.
- A version is given up when all sources have lied, or nobody has delivered for `give_up_s`. Those who only failed may
  come back, and until then it costs next to nothing to knock.

A source that is silent for too long loses its turn:

- Silence counts while a source owes a word: a chunk that it can send, or the answer to a CANCEL. Every message ends it,
  and so do the bytes of a chunk on its way.
- It is too long after the mean of that source's answer times and four deviations, as TCP times out (RFC 6298), but not
  before `silence_s`. A source without an answer has twice the longest patience of those that have one.
- Time counts only while this node can hear. Time since a look that came late does not: this process was busy. Time in
  which no source says a word does not either, unless a single one owes one: the network was down, or we did not read.
- Who is passed over by mistake loses little: it answers the CANCELs and is asked again, and of what it had begun to
  send at most one chunk comes twice.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from statistics import median_low

from protocol.ids import ChunkId
from swarm_node.picker.rules import PickerRules, PlanPace
from swarm_node.picker.sources import SourceState


@dataclass(frozen=True)
class Survey:
    """What was found."""

    until: float = -math.inf
    """As long as it may be taken for the truth."""
    usual_s: float = 0.0
    """How long peers take to answer."""
    typical_told: int = 0
    """How many of the chunks that were missing here peers have; of those whose exchange ended nobody knows."""
    overdue: dict[ChunkId, None] = field(default_factory=dict)
    """Chunks that everybody who was asked should have sent by now, the oldest WANT first; the picker takes out what it
    asks of another."""


def look_around(
    states: Collection[SourceState],
    missing: Collection[ChunkId],
    rules: PickerRules,
    pace: PlanPace,
    *,
    at_end: bool,
    now: float,
) -> Survey:
    """Survey the sources; `at_end` every chunk is asked of somebody."""
    usual = [state.usual_s for state in states if state.usual_s and state.source.kind == "peer"]
    told = [state.told.bit_count() for state in states if state.source.kind == "peer" and not state.lost]
    usual_s = sum(usual) / len(usual) if usual else 0.0
    least_s, factor = rules.overdue_s, rules.overdue_factor
    if at_end:
        least_s, factor = rules.last_overdue_s, rules.last_overdue_factor
    asked = [(state, state.usual_s or usual_s or pace.hop_s) for state in states if state.asked]
    patience = [(state, max(least_s, factor * answer_s)) for state, answer_s in asked]
    overdue: dict[ChunkId, float] = {}
    for state, patience_s in patience:
        for chunk, since in state.asked.items():
            if since + patience_s <= now and chunk in missing and state.is_late(chunk, patience_s, now):
                overdue[chunk] = min(since, overdue.get(chunk, since))
    for state, patience_s in patience if overdue else ():
        for chunk in overdue.keys() & state.asked.keys() - state.taken_back:
            if not state.is_late(chunk, patience_s, now):
                del overdue[chunk]
    return Survey(
        until=now + rules.survey_s,
        usual_s=usual_s,
        typical_told=median_low(told) if told else 0,
        overdue=dict.fromkeys(sorted(overdue, key=overdue.__getitem__)),
    )


def needs_origin(states: Collection[SourceState], silence_s: float, rules: PickerRules, pace: PlanPace) -> bool:
    """Nobody has delivered for so long that the origin must, or there is nobody else."""
    others = (state for state in states if state.source.kind != "origin")
    return silence_s >= rules.origin_patience_s + pace.lag_s or all(state.is_out for state in others)


def lacking_elsewhere(
    origin: SourceState, states: Collection[SourceState], unasked: Collection[ChunkId]
) -> ChunkId | None:
    """What the seeder does not hold, and so nobody will, but for what the origin owes us already."""
    lacks = [state.lacks for state in states if state.source.kind == "seeder" and not state.gone]
    lacking = (chunk for chunk in (lacks[0] if lacks else ()) if chunk in unasked and chunk not in origin.asked)
    return next((chunk for chunk in lacking if origin.can_answer(chunk)), None)


def hopeless(states: Collection[SourceState], silence_s: float, rules: PickerRules, pace: PlanPace) -> bool:
    """Nothing more can be expected from anybody."""
    return all(state.gone for state in states) or silence_s >= rules.give_up_s + pace.lag_s


class Hearing:
    """The clock, and who owes a word on it."""

    def __init__(self, now: float, *, from_s: float) -> None:
        self._counted_s, self._from_s = 0.0, from_s
        self._looked_at = self._word_at = now

    def record_word(self, state: SourceState, at: float) -> None:
        """Record that a source said something, or that bytes of it arrived."""
        if at > state.word_at:
            state.word_at, state.heard_s, state.fell_silent = at, self._counted_s, False
            self._word_at = max(self._word_at, at)

    def advance(self, states: Collection[SourceState], now: float, rules: PickerRules) -> list[SourceState]:
        """Let time pass; return the sources that have become silent."""
        passed_s, self._looked_at = now - self._looked_at, now
        owing = [state for state in states if state.owes_word and not state.fell_silent]
        is_in_time = now >= self._from_s and passed_s <= 2 * rules.look_s
        if is_in_time and (now < self._word_at + rules.look_s or len(owing) == 1):
            self._counted_s += passed_s
        for state in states:
            if not state.owes_word:
                state.heard_s = self._counted_s
        known_s = [state.answers.patience_s(rules.silence_s) for state in states if state.answers.count]
        unknown_s = 2 * max(known_s, default=math.inf)
        silent = [state for state in owing if self._counted_s >= state.heard_s + _patience_s(state, unknown_s, rules)]
        for state in silent:
            state.fell_silent = True
        return silent


def _patience_s(state: SourceState, unknown_s: float, rules: PickerRules) -> float:
    return state.answers.patience_s(rules.silence_s) if state.answers.count else unknown_s
