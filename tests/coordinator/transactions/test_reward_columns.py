"""Components of rewards: stored beside their scores, and read back unchanged."""

import json

from coordinator.transactions import reward_columns
from protocol.tasks import Reward

REWARDS = [
    Reward(1.0, "ok", {"exact": 1.0, "format": 0.5}),
    Reward(0.0, "invalid", {"exact": 0.0}),
    Reward(-0.25, "ok", {}),
]


def test_rewards_come_back_as_they_were() -> None:
    assert reward_columns.read(reward_columns.stored(REWARDS)) == REWARDS


def test_a_rollout_that_waits_for_its_rewards_has_none() -> None:
    assert reward_columns.read(reward_columns.stored([])) == []


def test_how_samples_are_learned_from_comes_back_and_costs_nothing_where_nothing_is_said() -> None:
    said = [Reward(1.0, "ok", weight=0.5, skip=((0, 2), (4, 5))), Reward(0.0, "ok")]
    stored = reward_columns.stored(said)
    assert reward_columns.read(stored) == said
    assert reward_columns.learned(json.loads(json.dumps(stored["marks"])), 2) == [(0.5, ((0, 2), (4, 5))), (1.0, ())]
    assert set(reward_columns.stored(REWARDS)["marks"]) == {"invalid", "components"}
    assert reward_columns.learned({}, 2) == [(1.0, ()), (1.0, ())]
