"""When nothing else helps: whether to ask the origin, and whether to give up; pure decisions over what is known.

- The origin is the last resort: for what the seeder lacks, when nothing comes (`origin_patience_s`), or where there is
  nobody else to count on.
- A version is given up when all sources have lied, or nobody has delivered for `give_up_s`. Those who only failed may
  come back, and until then it costs next to nothing to knock.
"""

from collections.abc import Collection

from protocol.ids import ChunkId
from swarm_node.picker_rules import PickerRules
from swarm_node.plan_pace import PlanPace
from swarm_node.sources import SourceState


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
