"""Choice of the samples of a batch that are trained on, against numbers computed by hand."""

from dataclasses import replace

import pytest
import torch

from coordinator.learner.advantages import factors
from coordinator.learner.algorithm import GRPO, Algorithm
from coordinator.learner.objective import LossTerms, policy_loss, shares

OWNERS = torch.tensor([0, 0, 0, 0, 1, 1, 1])
ADVANTAGES = torch.tensor([2.0, -1.0, 1.0, -2.0, 0.5, -0.25, 0.0])
PAIRS = replace(GRPO, trajectories="pairs", trajectory_share=0.5)
WEIGHTED = replace(GRPO, trajectories="weighted", trajectory_share=0.5)


def chosen(algorithm: Algorithm, *, seed: int = 0, update: int = 0) -> torch.Tensor:
    return factors(ADVANTAGES, OWNERS, algorithm, seed=seed, update=update)


def test_all_are_trained_on_where_nothing_is_said() -> None:
    assert chosen(GRPO).tolist() == [1.0] * 7


def test_pairs_of_the_greatest_contrast_are_kept() -> None:
    """Group 0: (2, −2) and (1, −1); the first is half of two. Group 1: one pair, (0.5, −0.25); the 0 is in none."""
    assert chosen(PAIRS).tolist() == [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]


def test_all_pairs_leave_out_the_odd_one_alone() -> None:
    assert chosen(replace(PAIRS, trajectory_share=1.0)).tolist() == [1.0] * 6 + [0.0]


def test_a_pair_without_contrast_is_none() -> None:
    found = factors(torch.zeros(4), torch.zeros(4, dtype=torch.long), PAIRS, seed=0, update=0)
    assert found.tolist() == [0.0] * 4


def test_ties_go_to_who_comes_first() -> None:
    tied = torch.tensor([1.0, 1.0, -1.0, -1.0])
    found = factors(tied, torch.zeros(4, dtype=torch.long), PAIRS, seed=0, update=0)
    assert found.tolist() == [1.0, 0.0, 0.0, 1.0]


def test_draws_by_advantage_are_weighted_back() -> None:
    """Σ|A| = 6.75 and ⌈0.5 · 6⌉ = 3 draws give one draw per 2.25: each draw of a sample counts 2.25/|A|."""
    found = chosen(WEIGHTED)
    drawn = found * ADVANTAGES.abs() / 2.25
    assert drawn.tolist() == pytest.approx(drawn.round().tolist(), abs=1e-6)
    assert float(drawn.sum()) == pytest.approx(3.0)
    assert float(found[6]) == 0.0, "what has no advantage teaches nothing, and is never drawn"


def test_what_is_drawn_is_unbiased() -> None:
    """Averaged over all offsets of the draw, each factor is 1, except for the sample without an advantage."""
    draws = torch.stack([chosen(WEIGHTED, update=update) for update in range(4000)])
    assert draws.mean(0).tolist() == pytest.approx([1.0] * 6 + [0.0], abs=0.06)


def test_the_same_update_draws_the_same_again_and_another_does_not() -> None:
    assert torch.equal(chosen(WEIGHTED, seed=3, update=7), chosen(WEIGHTED, seed=3, update=7))
    others = {tuple(chosen(WEIGHTED, seed=3, update=update).tolist()) for update in range(20)}
    assert len(others) > 3
    assert any(
        not torch.equal(chosen(WEIGHTED, seed=3, update=update), chosen(WEIGHTED, seed=4, update=update))
        for update in range(5)
    )


def test_drawing_leaves_torchs_own_randomness_alone() -> None:
    before = torch.get_rng_state()
    chosen(WEIGHTED)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("algorithm", [PAIRS, WEIGHTED])
def test_a_batch_that_teaches_nothing_stays_one(algorithm: Algorithm) -> None:
    found = factors(torch.zeros(3), torch.zeros(3, dtype=torch.long), algorithm, seed=0, update=0)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("preset", [GRPO, replace(GRPO, clip="cispo", epsilon_high=5.0), replace(GRPO, delta=1.5)])
def test_the_loss_of_all_draws_is_on_the_mean_that_of_all_samples(preset: Algorithm) -> None:
    """A clipped objective is homogeneous in A ≥ 0 and in A ≤ 0, so weights on advantages are weights on samples."""
    torch.manual_seed(0)
    mask = torch.ones(7, 3)
    current = torch.log(torch.rand(7, 3) * 0.5 + 0.4)
    terms = LossTerms(
        behaviour=torch.log(torch.rand(7, 3) * 0.5 + 0.4),
        mask=mask,
        shares=shares(mask, preset, longest=3),
        advantages=ADVANTAGES,
        old=torch.log(torch.rand(7, 3) * 0.5 + 0.4),
    )
    drawing = replace(preset, trajectories="weighted", trajectory_share=0.5)
    whole, _ = policy_loss(current, terms, preset)
    drawn = [
        float(policy_loss(current, replace(terms, advantages=ADVANTAGES * chosen(drawing, update=update)), preset)[0])
        for update in range(2000)
    ]
    assert sum(drawn) / len(drawn) == pytest.approx(float(whole), abs=0.02)
