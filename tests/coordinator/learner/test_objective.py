"""The loss against numbers worked out by hand."""

from dataclasses import replace
from math import log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coordinator.learner.algorithm import PRESETS, Algorithm, Correction
from coordinator.learner.objective import LossTerms, Metrics, kept, policy_loss, shares

WIDE = Algorithm(loss_aggregation="token", correction=Correction(sequence_low=0.5, sequence_high=2.0))
BYPASS = replace(WIDE, correction=replace(WIDE.correction, mode="bypass"))


def logs(*probabilities: float) -> torch.Tensor:
    """Return the log-probabilities of a sample: [1, T]."""
    return torch.tensor([probabilities]).log()


def judged(
    current: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: list[float],
    algorithm: Algorithm,
    *,
    mask: torch.Tensor | None = None,
    old: torch.Tensor | None = None,
    reference: torch.Tensor | None = None,
) -> tuple[float, list[list[float]], Metrics]:
    """Loss, gradient and metrics of a whole batch."""
    mask = torch.ones_like(behaviour) if mask is None else mask
    current = current.detach().requires_grad_()
    share = shares(mask, algorithm, longest=8)
    terms = LossTerms(behaviour, mask, share, torch.tensor(advantages), old=old, reference=reference)
    loss, metrics = policy_loss(current, terms, algorithm)
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    assert current.grad is not None
    return loss.item(), current.grad.tolist(), metrics


def clip_share(metrics: Metrics) -> float:
    return metrics["clip/low"] + metrics["clip/high"]


@pytest.mark.parametrize("mode", ["decoupled", "bypass", "none"])
def test_fresh_samples_give_the_plain_policy_gradient(mode: str) -> None:
    algorithm = replace(WIDE, correction=Correction(mode=mode))  # type: ignore[arg-type]  # the parameters are its values
    fresh = logs(0.5, 0.25)
    loss, gradient, metrics = judged(fresh, fresh, [2.0], algorithm)
    assert loss == pytest.approx(-2.0)
    assert gradient == [[-1.0, -1.0]]  # −A / N for each token
    assert metrics["is/ratio_mean"] == metrics["is/ess"] == pytest.approx(1.0)
    assert metrics["kl/k3"] == metrics["is/masked_frac"] == clip_share(metrics) == 0.0


def test_stale_tokens_are_weighed_by_their_ratio_up_to_the_cap() -> None:
    wide = replace(WIDE, correction=replace(WIDE.correction, sequence_high=100.0))
    loss, gradient, metrics = judged(logs(0.3, 0.8), logs(0.2, 0.1), [1.0], wide)
    assert loss == pytest.approx(-(1.5 + 2.0) / 2)  # the second ratio is 8, capped at 2
    assert gradient[0] == pytest.approx([-0.75, -1.0])
    assert metrics["is/ratio_mean"] == pytest.approx((1.5 + 8.0) / 2)
    assert metrics["is/ratio_max"] == pytest.approx(8.0)
    assert metrics["is/ess"] == pytest.approx(3.5**2 / (2 * (1.5**2 + 2.0**2)))


def test_three_policies_weigh_by_one_ratio_and_clip_the_other() -> None:
    """μ = 0.2, π_old = 0.3, π_θ = 0.6: the weight is 1.5 and the ratio 2 is clipped at 1.28."""
    loss, gradient, metrics = judged(logs(0.6), logs(0.2), [1.0], WIDE, old=logs(0.3))
    assert loss == pytest.approx(-1.5 * 1.28)
    assert gradient == [[0.0]]
    assert clip_share(metrics) == 1.0
    loss, gradient, _ = judged(logs(0.6), logs(0.2), [-1.0], WIDE, old=logs(0.3))
    assert loss == pytest.approx(1.5 * 2.0)
    assert gradient[0] == pytest.approx([1.5 * 2.0])


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
    loss, gradient, metrics = judged(logs(probability), logs(0.5), [advantage], BYPASS)
    assert loss == pytest.approx(-gain)
    assert clip_share(metrics) == float(clipped)
    assert (gradient[0][0] == 0.0) == clipped


def test_delta_bounds_what_a_bad_token_that_became_likely_can_do() -> None:
    dual = replace(WIDE, delta=3.0)
    loss, gradient, _ = judged(logs(0.8), logs(0.1), [-1.0], dual, old=logs(0.1))
    assert loss == pytest.approx(3.0)
    assert gradient == [[0.0]]
    loss, _, _ = judged(logs(0.8), logs(0.1), [-1.0], WIDE, old=logs(0.1))
    assert loss == pytest.approx(8.0)


def test_no_correction_takes_every_sample_for_fresh() -> None:
    loss, gradient, metrics = judged(logs(0.9), logs(1e-6), [1.0], replace(WIDE, correction=Correction(mode="none")))
    assert loss == pytest.approx(-1.0)
    assert gradient == [[-1.0]]
    assert metrics["is/masked_frac"] == 0.0


def test_gspo_has_one_ratio_for_a_sample_the_geometric_mean() -> None:
    gspo = replace(PRESETS["gspo"], epsilon_high=9.0, correction=Correction(mode="none"))
    loss, gradient, _ = judged(logs(0.8, 0.1), logs(1, 1), [1.0], gspo, old=logs(0.2, 0.1))
    assert loss == pytest.approx(-2.0)  # √(4 · 1)
    assert gradient[0] == pytest.approx([-1.0, -1.0])  # half of it each
    _, gradient, metrics = judged(logs(0.8, 0.1), logs(1, 1), [1.0], PRESETS["gspo"], old=logs(0.2, 0.1))
    assert clip_share(metrics) == 1.0
    assert gradient == [[0.0, 0.0]]


def test_rloo_has_one_ratio_for_a_sample_the_product() -> None:
    rloo = replace(PRESETS["rloo"], epsilon_high=99.0, correction=Correction(mode="none"))
    loss, gradient, _ = judged(logs(0.8, 0.3), logs(1, 1), [1.0], rloo, old=logs(0.2, 0.1))
    assert loss == pytest.approx(-12.0)
    assert gradient[0] == pytest.approx([-12.0, -12.0])


def test_cispo_keeps_the_gradient_of_tokens_that_ppo_would_clip() -> None:
    cispo = replace(PRESETS["cispo"], epsilon_high=1.5, correction=Correction(mode="none"))
    loss, gradient, metrics = judged(logs(0.5, 0.2), logs(1, 1), [1.0], cispo, old=logs(0.1, 0.2))
    assert loss == pytest.approx(-(1.5 * log(0.5) + log(0.2)) / 2)
    assert gradient[0] == pytest.approx([-0.75, -0.5])
    assert clip_share(metrics) == 0.5


def test_the_papers_own_correction_truncates_and_drops_nothing() -> None:
    loss, _, metrics = judged(logs(0.9, 0.5), logs(1e-3, 1.0), [1.0], PRESETS["echo2"])
    assert loss == pytest.approx(-(2.0 + 0.5) / 2)  # min(900, 2) and 0.5
    assert metrics["is/masked_frac"] == 0.0


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("sequence", [[1 / 4, 1 / 4], [1 / 2, 0]]),
        ("token", [[1 / 3] * 2, [1 / 3, 0]]),
        ("constant", [[1 / 16] * 2, [1 / 16, 0]]),
    ],
)
def test_shares_of_tokens(aggregation: str, expected: list[list[float]]) -> None:
    algorithm = Algorithm(loss_aggregation=aggregation)  # type: ignore[arg-type]  # the parameters are its values
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    assert shares(mask, algorithm, longest=8).tolist() == [pytest.approx(row) for row in expected]


def test_a_batch_in_which_nothing_is_judged_has_no_loss_and_no_nan() -> None:
    for algorithm in PRESETS.values():
        loss, gradient, metrics = judged(logs(0.5, 0.5), logs(0.5, 0.5), [1.0], algorithm, mask=torch.zeros(1, 2))
        assert (loss, gradient) == (0.0, [[0.0, 0.0]])
        assert all(value == value for value in metrics.values())


def test_the_divergence_from_the_start_is_k3() -> None:
    algorithm = replace(WIDE, beta=0.5)
    here = logs(0.5, 0.25)
    loss, gradient, _ = judged(here, here, [0.0], algorithm, reference=logs(0.25, 0.25))
    assert loss == pytest.approx(0.5 * (0.5 + log(2) - 1) / 2)
    assert gradient[0] == pytest.approx([0.5 * (1 - 0.5) / 2, 0.0])


def test_tokens_that_the_policy_would_never_say_cannot_make_the_divergence_infinite() -> None:
    algorithm = replace(WIDE, beta=0.1, correction=Correction(mode="none"))
    never = torch.tensor([[-200.0, -0.5]])
    loss, gradient, metrics = judged(never, never, [1.0], algorithm, reference=logs(0.5, 0.5))
    assert all(value == value and abs(value) < 1e30 for value in (loss, *gradient[0], *metrics.values()))


def test_a_sample_that_is_dropped_pulls_towards_the_start_no_more() -> None:
    algorithm = replace(WIDE, beta=0.5)
    claimed, said = logs(0.9, 0.9), logs(1e-3, 1e-3)  # a lie: dropped by the bound on sequences
    loss, gradient, metrics = judged(said, claimed, [1.0], algorithm, reference=logs(0.5, 0.5))
    assert metrics["is/masked_frac"] == pytest.approx(1.0)
    assert (loss, gradient) == (0.0, [[0.0, 0.0]])


def test_a_sample_that_drifted_is_dropped_but_still_counted() -> None:
    near, far = [0.5, 0.5], [0.9, 0.9]  # the far one's geometric mean ratio is 9, over the bound of 2
    behaviour = torch.tensor([[0.5, 0.5], [0.1, 0.1]]).log()
    loss, _, metrics = judged(torch.tensor([near, far]).log(), behaviour, [1.0, 1.0], WIDE)
    assert loss == pytest.approx(-2 / 4)  # two tokens kept, four in the denominator
    assert metrics["is/masked_frac"] == pytest.approx(0.5)


def test_the_sequence_bound_is_on_the_geometric_mean() -> None:
    _, _, metrics = judged(logs(0.9, 0.1), logs(0.1, 0.9), [1.0], WIDE)  # ratios 9 and 1/9: their mean is 1
    assert metrics["is/masked_frac"] == 0.0


def test_one_absurd_token_vetoes_its_sample() -> None:
    steady = [0.9] * 30
    _, _, metrics = judged(logs(1e-6, *steady), logs(0.9, *steady), [1.0], WIDE)
    assert metrics["is/masked_frac"] == pytest.approx(1.0)


@pytest.mark.parametrize("mode", ["decoupled", "bypass"])
@pytest.mark.parametrize("level", ["token", "product"])
def test_a_claim_of_absurd_logprobs_cannot_make_the_loss_nan(mode: str, level: str) -> None:
    algorithm = replace(WIDE, importance_sampling_level=level, correction=Correction(mode=mode))  # type: ignore[arg-type]  # the parameters are its values
    for claimed in (-3e38, -1000.0, 0.0):
        loss, gradient, metrics = judged(logs(0.5, 0.5), torch.full((1, 2), claimed), [-1.0], algorithm)
        assert all(value == value and abs(value) < 1e30 for value in (loss, *gradient[0], *metrics.values()))


def test_padding_has_no_say() -> None:
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    behaviour = torch.tensor([[0.2, 0.4, 1.0]]).log()
    for algorithm in PRESETS.values():
        results = [judged(logs(0.3, 0.3, padding), behaviour, [1.0], algorithm, mask=mask) for padding in (0.5, 1e-9)]
        assert results[0] == results[1]
        assert results[0][1][0][2] == 0.0


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_infinity_has_no_say_where_nothing_is_judged(name: str) -> None:
    """An environment's tokens may be impossible for the policy, and infinity times 0 is not 0."""
    algorithm, mask = replace(PRESETS[name], beta=0.5), torch.tensor([[1.0, 1.0, 0.0]])

    def found(masked: float) -> tuple[float, list[list[float]], Metrics]:
        current, behaviour, old, reference = (logs(*said, masked) for said in ((0.3, 0.3), (0.2, 0.4)) * 2)
        return judged(current, behaviour, [1.0], algorithm, mask=mask, old=old, reference=reference)

    assert found(0.0) == found(1.0)


@given(
    st.sampled_from(sorted(PRESETS)),
    st.lists(st.tuples(st.floats(-3, 0), st.floats(-3, 0), st.floats(-3, 0)), min_size=6, max_size=6),
    st.integers(1, 2),
)
def test_losses_and_gradients_of_pieces_add_up(name: str, values: list[tuple[float, float, float]], cut: int) -> None:
    algorithm = PRESETS[name]
    current, behaviour, old = torch.tensor(values).T.reshape(3, 3, 2)
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    terms = LossTerms(behaviour, mask, shares(mask, algorithm, longest=4), torch.tensor([1.0, -2.0, 0.5]), old=old)
    rows = (torch.arange(cut), torch.arange(cut, 3))
    whole, _ = policy_loss(current, terms, algorithm)
    parts = [policy_loss(current[some], terms.rows(some, 2), algorithm)[0] for some in rows]
    assert sum(part.item() for part in parts) == pytest.approx(whole.item(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(("nats", "dropped"), [(0.56, 0.0), (-0.56, 0.0), (0.8, 1.0), (-0.8, 1.0)])
def test_the_default_keeps_what_a_trained_model_leaves_behind_in_four_updates(nats: float, dropped: float) -> None:
    """0.56 nats a token: the furthest batch of `make bench-correction` had 95 % of its samples nearer."""
    mask = torch.ones(1, 4)
    kept_ = kept(torch.full((1, 4), nats), mask, Correction())
    assert float(1 - kept_.mean()) == dropped
