"""The loss against numbers worked out by hand."""

import math

import pytest
import torch

from coordinator.learner.grpo import LossSettings, group_advantages, policy_loss, token_logprobs

ONE_SAMPLE = torch.ones(1)


def logs(*probabilities: float) -> torch.Tensor:
    """One sample's log-probabilities: [1, T]."""
    return torch.tensor([probabilities]).log()


def test_advantages_are_centred_and_scaled_per_group() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 5.0, 7.0])
    advantages = group_advantages(rewards, torch.tensor([0, 0, 0, 0, 1, 1]), 2)
    # Group 0: mean 1/4, deviation √3/4. Group 1: mean 6, deviation 1.
    third = 1 / math.sqrt(3)
    assert advantages.tolist() == pytest.approx([math.sqrt(3), -third, -third, -third, -1.0, 1.0])


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])  # the mean of tenths is off by a rounding
def test_a_group_of_equal_rewards_teaches_nothing(reward: float) -> None:
    advantages = group_advantages(torch.full((7,), reward), torch.zeros(7, dtype=torch.long), 1)
    assert advantages.tolist() == [0.0] * 7


def test_samples_of_groups_may_lie_in_any_order() -> None:
    rewards = torch.tensor([1.0, 2.0, 0.0, 2.0])
    advantages = group_advantages(rewards, torch.tensor([0, 1, 0, 1]), 2)
    assert advantages.tolist() == pytest.approx([1.0, 0.0, -1.0, 0.0])


def test_logprobs_are_taken_at_the_sampling_temperature() -> None:
    logits = torch.tensor([[[0.0, math.log(3.0)]]])
    at_one, entropy = token_logprobs(logits, torch.tensor([[1]]), 1.0)
    assert at_one.exp().item() == pytest.approx(3 / 4)
    assert entropy.item() == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    at_half, _ = token_logprobs(logits, torch.tensor([[1]]), 0.5)
    assert at_half.exp().item() == pytest.approx(9 / 10)


def test_logprobs_are_float32_whatever_the_model_computes_in() -> None:
    logits = torch.zeros(1, 1, 3, dtype=torch.bfloat16)
    assert token_logprobs(logits, torch.tensor([[0]]), 1.0)[0].dtype == torch.float32


@pytest.mark.parametrize("correction", ["decoupled", "bypass"])
def test_fresh_samples_give_the_plain_policy_gradient(correction: str) -> None:
    settings = LossSettings(correction=correction)  # type: ignore[arg-type]  # the parameters are its two values
    current = logs(0.5, 0.25).requires_grad_()
    loss, metrics = policy_loss(current, current.detach(), torch.tensor([2.0]), torch.ones(1, 2), settings)
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    assert loss.item() == pytest.approx(-2.0)
    assert current.grad is not None
    assert current.grad.tolist() == [[-1.0, -1.0]]  # −A / N for each token
    assert metrics["ratio_mean"] == pytest.approx(1.0)
    assert metrics["kl"] == metrics["clip_share"] == metrics["dropped_share"] == 0.0
    assert metrics["effective_samples"] == pytest.approx(1.0)


def test_stale_tokens_are_weighed_by_their_ratio_up_to_the_cap() -> None:
    settings = LossSettings(sequence_high=100.0)
    current = logs(0.3, 0.8).requires_grad_()
    loss, metrics = policy_loss(current, logs(0.2, 0.1), ONE_SAMPLE, torch.ones(1, 2), settings)
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    assert loss.item() == pytest.approx(-(1.5 + 2.0) / 2)  # the second ratio is 8, capped at 2
    assert current.grad is not None
    assert current.grad[0].tolist() == pytest.approx([-0.75, -1.0])
    assert metrics["ratio_mean"] == pytest.approx((1.5 + 8.0) / 2)
    assert metrics["ratio_max"] == pytest.approx(8.0)
    assert metrics["effective_samples"] == pytest.approx(3.5**2 / (2 * (1.5**2 + 2.0**2)))


@pytest.mark.parametrize(
    ("advantage", "probability", "gain", "clipped"),
    [
        (1.0, 0.60, 1.20, False),
        (1.0, 0.80, 1.28, True),  # a likelier good token: bounded by 1 + 0.28
        (1.0, 0.30, 0.60, False),  # a good token that became unlikely is pulled back without bound
        (-1.0, 0.45, -0.90, False),
        (-1.0, 0.30, -0.80, True),  # an unlikelier bad token: bounded by 1 − 0.2
        (-1.0, 0.80, -1.60, False),
    ],
)
def test_bypass_clips_the_whole_ratio(advantage: float, probability: float, gain: float, clipped: bool) -> None:
    current = logs(probability).requires_grad_()
    settings = LossSettings(correction="bypass")
    loss, metrics = policy_loss(current, logs(0.5), torch.tensor([advantage]), torch.ones(1, 1), settings)
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    assert loss.item() == pytest.approx(-gain)
    assert metrics["clip_share"] == float(clipped)
    assert current.grad is not None
    assert (current.grad.item() == 0.0) == clipped


def test_a_sample_that_drifted_is_dropped_but_still_counted() -> None:
    near, far = [0.5, 0.5], [0.9, 0.9]  # the far one's geometric mean ratio is 9, over the bound of 2
    current = torch.tensor([near, far]).log()
    behaviour = torch.tensor([[0.5, 0.5], [0.1, 0.1]]).log()
    loss, metrics = policy_loss(current, behaviour, torch.ones(2), torch.ones(2, 2), LossSettings())
    assert loss.item() == pytest.approx(-2 / 4)  # two tokens kept, four in the denominator
    assert metrics["dropped_share"] == pytest.approx(0.5)


def test_the_sequence_bound_is_on_the_geometric_mean() -> None:
    current, behaviour = logs(0.9, 0.1), logs(0.1, 0.9)  # ratios 9 and 1/9: their geometric mean is 1
    _, metrics = policy_loss(current, behaviour, ONE_SAMPLE, torch.ones(1, 2), LossSettings())
    assert metrics["dropped_share"] == 0.0


def test_one_absurd_token_vetoes_its_sample() -> None:
    steady = [0.9] * 30
    current, behaviour = logs(1e-6, *steady), logs(0.9, *steady)
    _, metrics = policy_loss(current, behaviour, ONE_SAMPLE, torch.ones(1, 31), LossSettings())
    assert metrics["dropped_share"] == pytest.approx(1.0)


def test_padding_has_no_say() -> None:
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    behaviour = torch.tensor([[0.2, 0.4, 1.0]]).log()
    results = []
    for padding in (0.5, 1e-9):
        current = torch.tensor([[0.3, 0.3, padding]]).log().requires_grad_()
        loss, metrics = policy_loss(current, behaviour, ONE_SAMPLE, mask, LossSettings())
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        assert current.grad is not None
        assert current.grad[0, 2].item() == 0.0
        results.append((loss.item(), metrics))
    assert results[0] == results[1]
