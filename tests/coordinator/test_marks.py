"""What rewards are made of: stored beside their scores, and read back as they were."""

from coordinator import marks
from protocol.tasks import Reward

REWARDS = [
    Reward(1.0, "ok", {"exact": 1.0, "format": 0.5}),
    Reward(0.0, "invalid", {"exact": 0.0}),
    Reward(-0.25, "ok", {}),
]


def test_rewards_come_back_as_they_were() -> None:
    assert marks.read(marks.stored(REWARDS)) == REWARDS


def test_a_rollout_that_waits_for_its_rewards_has_none() -> None:
    assert marks.read(marks.stored([])) == []
