"""Survey of all sources of a version at one moment: answer times, announced chunks, overdue chunks.

The last resorts are the origin and giving up:

- The origin is used for chunks that the seeder lacks, when nothing arrives (`origin_patience_s`), or when there is no
  other source to rely on.
- A version is given up when all sources have lied, or none has delivered for `give_up_s`. Sources that only failed may
  come back, and until then retries cost almost nothing.

A source that is silent for too long loses its turn:

- Silence counts while a source owes an answer: a chunk that it can send, or the answer to a CANCEL. Every message ends
  the silence, and so do bytes of a chunk.
- The limit is the mean of that source's answer times plus four deviations, like TCP's timeout (RFC 6298), and at least
  `silence_s`. A source without an answer has twice the longest limit of the others.
- Time counts only while this node can receive. Time before a late check does not count: this process was busy. Time
  without a message from any source does not count either, unless only one source owes an answer: the network was down,
  or this node did not read.
- A source that is passed over by mistake loses little: it answers the CANCELs and is asked again, and at most one chunk
  that it had begun to send arrives twice.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from statistics import median_low

from protocol.ids import ChunkId
from swarm_node.picker.sources import PickerRules, PlanPace, SourceState


@dataclass(frozen=True)
class Survey:
    """Result of a survey."""

    until: float = -math.inf
    """Time until which the result is valid."""
    usual_s: float = 0.0
    """Mean answer time of peers."""
    typical_told: int = 0
    """Median number of the chunks missing at the start that a peer announced; without peers whose exchange ended."""
    overdue: dict[ChunkId, None] = field(default_factory=dict)
    """Chunks that are overdue at every source asked, the oldest WANT first; the picker removes chunks that it requests
    elsewhere."""


def look_around(
    states: Collection[SourceState],
    missing: Collection[ChunkId],
    rules: PickerRules,
    pace: PlanPace,
    *,
    at_end: bool,
    now: float,
) -> Survey:
    """Survey the sources; `at_end` means that every chunk is requested."""
    usual = [state.usual_s for state in states if state.usual_s and state.source.kind == "peer"]
    counts = [state.told.bit_count() for state in states if state.source.kind == "peer" and not state.lost]
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
        typical_told=median_low(counts) if counts else 0,
        overdue=dict.fromkeys(sorted(overdue, key=overdue.__getitem__)),
    )


def needs_origin(states: Collection[SourceState], silence_s: float, rules: PickerRules, pace: PlanPace) -> bool:
    """Return True if no source has delivered for too long, or the origin is the only source to rely on."""
    others = (state for state in states if state.source.kind != "origin")
    return silence_s >= rules.origin_patience_s + pace.lag_s or all(state.is_out for state in others)


def lacking_elsewhere(
    origin: SourceState, states: Collection[SourceState], unasked: Collection[ChunkId]
) -> ChunkId | None:
    """Return a chunk that the seeder lacks, so that only the origin has it, and that the origin does not owe yet."""
    lacks = [state.lacks for state in states if state.source.kind == "seeder" and not state.gone]
    lacking = (chunk for chunk in (lacks[0] if lacks else ()) if chunk in unasked and chunk not in origin.asked)
    return next((chunk for chunk in lacking if origin.can_answer(chunk)), None)


def hopeless(states: Collection[SourceState], silence_s: float, rules: PickerRules, pace: PlanPace) -> bool:
    """Return True if no source can be expected to deliver anything."""
    return all(state.gone for state in states) or silence_s >= rules.give_up_s + pace.lag_s


class Hearing:
    """Clock that counts the silence of sources, and detects silent ones."""

    def __init__(self, now: float, *, from_s: float) -> None:
        self._counted_s, self._from_s = 0.0, from_s
        self._looked_at = self._word_at = now

    def record_word(self, state: SourceState, at: float) -> None:
        """Record that a message or bytes of a source arrived."""
        if at > state.word_at:
            state.word_at, state.heard_s, state.fell_silent = at, self._counted_s, False
            self._word_at = max(self._word_at, at)

    def advance(self, states: Collection[SourceState], now: float, rules: PickerRules) -> list[SourceState]:
        """Advance the clock; return the sources that have become silent."""
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
