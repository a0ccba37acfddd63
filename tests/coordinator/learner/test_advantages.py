"""Advantages against numbers worked out by hand."""

from math import sqrt

import pytest
import torch

from coordinator.learner.advantages import advantages, judged, of_batch, of_group, overlong_penalty, varied
from coordinator.learner.algorithm import PRESETS, Algorithm, Baseline
from coordinator.model.batch import collate
from tests.coordinator.learner.groups import UNEQUAL

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
    assert found.tolist() == [0.0] * 7


@pytest.mark.parametrize("baseline", ["batch", "none"])
def test_no_advantage_is_divided_by_a_deviation_of_nothing(baseline: Baseline) -> None:
    """A group of equal rewards lies above or below the mean of a batch; but it has no deviation of its own."""
    rewards, owners = torch.tensor([1.0, 1.0, 0.0, 0.5]), torch.tensor([0, 0, 1, 1])
    found = advantages(rewards, owners, 2, Algorithm(baseline=baseline, scale_rewards="group"))
    assert found[:2].tolist() == [0.0, 0.0]
    assert found.abs().max() < 10


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


def test_a_group_alone_has_the_advantages_that_its_batch_trains_with() -> None:
    data = collate(UNEQUAL)
    for name in ("grpo", "dapo", "dr_grpo", "rloo"):
        algorithm = PRESETS[name]
        whole = of_batch(data, judged(data, algorithm, ends=[2]), algorithm, longest=4).tolist()
        alone = [of_group(group, algorithm, ends=[2], longest=4) for group in UNEQUAL]
        assert [advantage for one in alone for advantage in one or ()] == pytest.approx(whole)
        assert alone[2] == (0.0, 0.0)
    truncated = of_group(UNEQUAL[1], PRESETS["dapo"], ends=[2], longest=4)
    assert truncated is not None
    assert truncated[1] == 0.0, "its second sample has no end"


def test_a_mean_of_the_batch_is_not_known_from_a_group() -> None:
    assert of_group(UNEQUAL[0], PRESETS["reinforce_pp"], ends=[2], longest=4) is None


def test_a_weight_counts_after_the_baseline() -> None:
    """Rewards 1 and 0: ±1 by their group. The weights 0.5 and 0 are on these, not on the rewards."""
    first = UNEQUAL[0]
    weighted = tuple(
        sample.model_copy(update={"weight": weight}) for sample, weight in zip(first.samples, (0.5, 0.0), strict=True)
    )
    found = of_group(first.model_copy(update={"samples": weighted}), PRESETS["grpo"], ends=[2], longest=4)
    assert found == (0.5, 0.0)
