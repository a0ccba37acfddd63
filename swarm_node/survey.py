"""How all sources of a version are doing at one moment: how fast they answer, what they hold, what is overdue."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from statistics import median_low

from protocol.ids import ChunkId
from swarm_node.picker_rules import PickerRules
from swarm_node.plan_pace import PlanPace
from swarm_node.sources import SourceState


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
    told = [len(state.told) for state in states if state.source.kind == "peer" and not state.lost]
    usual_s = sum(usual) / len(usual) if usual else 0.0
    least_s, factor = rules.overdue_s, rules.overdue_factor
    if at_end:
        least_s, factor = rules.last_overdue_s, rules.last_overdue_factor
    overdue: dict[ChunkId, float] = {}
    punctual: set[ChunkId] = set()
    for state in (state for state in states if state.asked):
        patience_s = max(least_s, factor * (state.usual_s or usual_s or pace.hop_s))
        for chunk, since in state.asked.items():
            if chunk in missing and chunk not in state.taken_back:
                if now < max(since, state.begun.get(chunk, since)) + patience_s:
                    punctual.add(chunk)
                else:
                    overdue[chunk] = min(since, overdue.get(chunk, since))
    overdue_everywhere = (chunk for chunk in overdue if chunk not in punctual)
    return Survey(
        until=now + rules.survey_s,
        usual_s=usual_s,
        typical_told=median_low(told) if told else 0,
        overdue=dict.fromkeys(sorted(overdue_everywhere, key=overdue.__getitem__)),
    )
