"""When a source has been silent for too long and loses its turn: pure decisions, on a clock that counts fair time only.

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

from swarm_node.picker.rules import PickerRules
from swarm_node.picker.sources import SourceState


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

    def look(self, states: Collection[SourceState], now: float, rules: PickerRules) -> list[SourceState]:
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
