"""Advantages against numbers worked out by hand."""

from math import sqrt

import pytest
import torch

from coordinator.learner.advantages import advantages, overlong_penalty, varied
from coordinator.learner.algorithm import PRESETS, Algorithm

TWO_GROUPS = torch.tensor([0, 0, 0, 0, 1, 1])
REWARDS = torch.tensor([1.0, 0.0, 0.0, 0.0, 5.0, 7.0])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Group 0: mean 1/4, deviation √3/4. Group 1: mean 6, deviation 1.
        ("grpo", [sqrt(3), *[-1 / sqrt(3)] * 3, -1.0, 1.0]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25, -1.0, 1.0]),
        ("rloo", [1.0, *[-1 / 3] * 3, -2.0, 2.0]),
        # Mean 13/6, deviation √(75/6 − (13/6)²).
        ("reinforce_pp", [(reward - 13 / 6) / sqrt(75 / 6 - (13 / 6) ** 2) for reward in REWARDS.tolist()]),
    ],
)
def test_advantages_by_hand(name: str, expected: list[float]) -> None:
    assert advantages(REWARDS, TWO_GROUPS, 2, PRESETS[name]).tolist() == pytest.approx(expected)


def test_no_baseline_leaves_rewards_alone() -> None:
    plain = Algorithm(baseline="none", scale_rewards="none")
    assert torch.equal(advantages(REWARDS, TWO_GROUPS, 2, plain), REWARDS)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])  # the mean of tenths is off by a rounding
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_equal_rewards_teach_nothing(name: str, reward: float) -> None:
    found = advantages(torch.full((7,), reward), torch.zeros(7, dtype=torch.long), 1, PRESETS[name])
    assert found.tolist() == pytest.approx([0.0] * 7, abs=1e-1 if name == "reinforce_pp" else 0.0)


def test_a_sample_alone_in_its_group_teaches_nothing() -> None:
    for name in ("grpo", "rloo"):
        assert advantages(torch.tensor([3.0]), torch.tensor([0]), 1, PRESETS[name]).tolist() == [0.0]


def test_samples_of_groups_may_lie_in_any_order() -> None:
    rewards, owners = torch.tensor([1.0, 2.0, 0.0, 2.0]), torch.tensor([0, 1, 0, 1])
    assert advantages(rewards, owners, 2, PRESETS["grpo"]).tolist() == pytest.approx([1.0, 0.0, -1.0, 0.0])
    assert varied(rewards, owners, 2).tolist() == [True, False]


def test_the_overlong_penalty_grows_over_the_buffer() -> None:
    soft = Algorithm(overlong_buffer=4, overlong_penalty=0.5)
    lengths = torch.tensor([1.0, 12.0, 13.0, 14.0, 16.0, 20.0])
    assert overlong_penalty(lengths, 16, soft).tolist() == pytest.approx([0.0, 0.0, -0.125, -0.25, -0.5, -0.5])
    assert overlong_penalty(lengths, 16, PRESETS["grpo"]).tolist() == [0.0] * 6
