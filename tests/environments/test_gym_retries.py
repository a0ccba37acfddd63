"""Problems of reasoning-gym with several tries."""

from typing import Any

import pytest

from coordinator.environments import gym_retries
from protocol.errors import ConfigInvalid
from protocol.tasks import Reward
from tests.environments.playing import play, problems

SUMS: dict[str, Any] = {"generator": "chain_sum", "args": {"min_terms": 2, "max_terms": 2}, "tries": 3, "discount": 0.5}


def answered(text: str) -> str:
    return f"<answer>{text}</answer>"


def test_a_wrong_answer_gets_feedback_and_another_try() -> None:
    first, second, _ = problems(gym_retries, **SUMS)

    at_once = play(gym_retries, first, [answered(first.answer)], **SUMS)
    assert at_once.read == [None]
    assert at_once.earned == Reward(1.0, "ok", {"tries": 1.0})

    later = play(gym_retries, second, [answered("1"), "I think <answer>", answered(second.answer)], **SUMS)
    assert later.read[0].startswith("Your answer is wrong. You have 2 more tries.")
    assert "1 more try." in later.read[1]
    assert later.read[2] is None
    assert later.earned == Reward(0.25, "ok", {"tries": 3.0})


def test_the_last_try_ends_the_episode() -> None:
    first, *_ = problems(gym_retries, **SUMS)
    lost = play(gym_retries, first, [answered("x")] * 9, **SUMS)
    assert lost.read[2:] == [None]
    assert lost.score < 0.1
    assert play(gym_retries, first, [""], **SUMS).earned.status == "invalid"


def test_the_same_seed_gives_the_same_problems_and_splits_share_none() -> None:
    assert problems(gym_retries, **SUMS) == problems(gym_retries, **SUMS)
    seeds = [
        {each.columns["seed"] for each in problems(gym_retries, split, size=50, **SUMS)}
        for split in ("train", "validation", "held_out")
    ]
    assert [len(each) for each in seeds] == [50, 50, 50]
    assert not seeds[0] & seeds[1] | seeds[1] & seeds[2] | seeds[0] & seeds[2]


def test_a_wrong_setting_is_named() -> None:
    with pytest.raises(ConfigInvalid, match="no generator 'no_such'"):
        problems(gym_retries, generator="no_such")
    with pytest.raises(ConfigInvalid, match="refuses its parameters"):
        problems(gym_retries, generator="chain_sum", args={"colour": "red"})
    with pytest.raises(ConfigInvalid, match="`tries` must be at least 1"):
        problems(gym_retries, **SUMS | {"tries": 0})
