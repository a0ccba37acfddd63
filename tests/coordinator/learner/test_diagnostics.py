"""Figures about an update, against numbers worked out by hand."""

from math import inf, log

import pytest
import torch

from coordinator.learner.objective import clipping_metrics, mean, ratio_metrics

NOTHING = torch.zeros(1, 2)
ALL = torch.ones(1, 2)
KEPT = torch.ones(1, 1)


def test_ratios_of_two_and_a_half() -> None:
    distance = torch.tensor([[log(2.0), log(0.5)]])
    found = ratio_metrics(distance, ALL, torch.tensor([[2.0, 0.5]]), KEPT)
    assert found["is/ratio_mean"] == pytest.approx(1.25)
    assert (found["is/ratio_min"], found["is/ratio_max"]) == pytest.approx((0.5, 2.0))
    assert found["is/chi2"] == pytest.approx((4 + 0.25) / 2 - 1)
    assert found["is/ess"] == pytest.approx(2.5**2 / (2 * 4.25))
    assert found["kl/k1"] == pytest.approx(0.0, abs=1e-7)
    assert found["kl/k3"] == pytest.approx((1.0 - log(2.0) + -0.5 + log(2.0)) / 2, abs=1e-6)
    assert found["is/masked_frac"] == 0.0


def test_k1_is_the_divergence_of_the_sampler_from_the_policy_and_may_be_negative() -> None:
    assert ratio_metrics(torch.tensor([[0.25, 0.75]]), ALL, ALL, KEPT)["kl/k1"] == pytest.approx(-0.5)


def test_padding_has_no_say_in_any_figure() -> None:
    mask = torch.tensor([[1.0, 0.0]])
    found = ratio_metrics(torch.tensor([[log(3.0), 0.0]]), mask, torch.tensor([[2.0, 9.0]]), KEPT)
    assert found["is/ratio_min"] == pytest.approx(3.0)
    assert found["is/ess"] == pytest.approx(1.0)


def test_infinity_has_no_say_where_nothing_is_judged() -> None:
    assert mean(torch.tensor([[3.0, inf], [-inf, 5.0]]), torch.eye(2)) == 4.0


def test_what_was_dropped_is_counted_by_tokens() -> None:
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    found = ratio_metrics(torch.zeros(2, 2), mask, mask, torch.tensor([[1.0], [0.0]]))
    assert found["is/masked_frac"] == pytest.approx(1 / 3)


def test_an_update_of_no_token_looks_like_a_fresh_one() -> None:
    found = ratio_metrics(NOTHING, NOTHING, NOTHING, KEPT)
    assert (found["is/ratio_mean"], found["is/ess"], found["is/chi2"], found["is/masked_frac"]) == (1.0, 1.0, 0.0, 0.0)


def test_quantiles_of_ratios_are_ratios_that_occurred_and_a_single_outlier_is_no_quantile() -> None:
    distance = torch.zeros(1, 200)
    distance[0, 0], distance[0, 1:3], distance[0, 3:6] = log(1000.0), log(0.5), log(3.0)
    found = ratio_metrics(distance, torch.ones(1, 200), torch.ones(1, 200), KEPT)
    assert (found["is/ratio_p01"], found["is/ratio_p99"]) == pytest.approx((0.5, 3.0))
    assert found["is/ratio_max"] == pytest.approx(1000.0)


def test_the_side_of_a_clip_follows_from_the_advantage() -> None:
    clipped = torch.tensor([[True, False], [True, True]])
    found = clipping_metrics(clipped, torch.tensor([[1.0], [-1.0]]), torch.ones(2, 2))
    assert found == {"clip/low": pytest.approx(0.5), "clip/high": pytest.approx(0.25)}
