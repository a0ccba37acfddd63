"""Margins and errors: zero for what the seed dictates, of the size of the noise, finite for anything."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rules.replay import MARGIN_MAX, joined, measure, score
from coordinator.rules.verdict import AuditOutcome, judge
from protocol.errors import NonFiniteNumber
from protocol.work.rollout import Completion
from protocol.work.sampling import pick, uniforms
from tests.coordinator.audit.claims import EXACT, VOCABULARY, drawn, honest, logits, replayed


def test_an_honest_sample_has_no_margin_and_no_error() -> None:
    measured = honest(500)
    assert (measured.claimed == measured.dictated).all()
    assert measured.margins.max() == 0
    assert np.abs(measured.errors).max() < 1e-6  # claims are float32


def test_the_dictated_tokens_are_those_of_the_sampling_definition() -> None:
    table, chances = logits(40), uniforms(7, 3, 40)
    odds = np.exp(table - table.max(-1, keepdims=True))
    assert score(table, chances, [0] * 40).dictated.tolist() == [
        pick(*pair) for pair in zip(odds, chances, strict=True)
    ]


@given(seed=st.integers(0, 2**63 - 1), token=st.integers(0, VOCABULARY - 1))
def test_a_margin_is_how_far_one_side_of_the_edge_must_rise(seed: int, token: int) -> None:
    """A little more than the margin, and the seed dictates the claimed token or passes it; a little less: no."""
    table, chances, ids = logits(1, seed=seed), uniforms(seed, 0, 1), np.arange(VOCABULARY)
    claim = Completion(np.array([token], np.uint32), np.zeros(1, np.float32), "length")
    margin = float(replayed(table, claim, seed).margins[0])
    early = int(score(table, chances, [token]).dictated[0]) < token
    rising = ids >= token if early else ids <= token

    def reached(nats: float) -> bool:
        dictated = int(score(table + nats * rising, chances, [token]).dictated[0])
        return dictated >= token if early else dictated <= token

    assert reached(margin * 1.001 + 1e-9)
    assert margin == 0 or not reached(margin * 0.999 - 1e-9)


def test_a_token_that_cannot_be_drawn_has_the_largest_margin() -> None:
    table = np.full((1, 4), -np.inf)
    table[0, 1] = 0.0
    for token in (0, 2, 3):
        claim = Completion(np.array([token], np.uint32), np.zeros(1, np.float32), "length")
        measured = replayed(table, claim, 5)
        assert 0 < measured.margins[0] <= MARGIN_MAX
        assert measured.margins[0] > 30
        assert np.isfinite(measured.errors).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_refused(bad: float) -> None:
    table = logits(3).copy()
    table[1, 4] = bad
    with pytest.raises(NonFiniteNumber), np.errstate(invalid="ignore"):
        score(table, uniforms(1, 0, 3), [0, 0, 0])


@pytest.mark.parametrize("noise", [1e-5, 1e-3, 1e-1])
def test_noise_of_the_logits_bounds_the_margins(noise: float) -> None:
    measured = honest(4000, noise=noise)
    assert measured.margins.max() < 10 * noise  # the noise has a deviation of twice that
    assert (measured.margins > 0).mean() < 10 * noise


@pytest.mark.parametrize("own", [0.0, 0.01, 0.3, 2.0])
@pytest.mark.parametrize("noise", [1e-5, 1e-3, 1e-1])
def test_noise_of_the_logits_bounds_the_margins_at_every_temperature(noise: float, own: float) -> None:
    """A tolerance that was measured at one temperature holds at the others."""
    measured = honest(4000, noise=noise, own=own)
    assert measured.margins.max() < 10 * noise
    assert (measured.margins > 0).mean() < 20 * noise
    assert np.abs(measured.errors).max() < 20 * noise


def test_at_temperature_0_the_margin_is_how_far_a_logit_is_below_the_largest() -> None:
    table = logits(30)
    for token in (0, 17, VOCABULARY - 1):
        claim = Completion(np.full(30, token, np.uint32), np.zeros(30, np.float32), "length")
        measured = replayed(table, claim, 1, own=0.0)
        assert np.allclose(measured.margins, table.max(-1) - table[:, token])
        assert (measured.dictated == table.argmax(-1)).all()


@pytest.mark.parametrize(("usual", "own"), [(0.5, 0.0), (0.5, 0.2), (0.5, 2.0), (2.0, 0.0), (2.0, 0.7)])
def test_margins_and_logprobs_are_in_nats_of_the_versions_temperature(usual: float, own: float) -> None:
    """Logits divided by the version's temperature give the same as these logits do at temperature 1."""
    table, chances, tokens = logits(200), uniforms(3, 0, 200), [number % VOCABULARY for number in range(200)]
    found, wanted = score(table, chances, tokens, usual, own), score(table / usual, chances, tokens, 1.0, own / usual)
    assert (found.dictated == wanted.dictated).all()
    assert np.allclose(found.margins, wanted.margins)
    assert np.allclose(found.logprobs, wanted.logprobs)


def test_at_a_low_temperature_a_wrong_token_has_the_margin_that_its_logit_has() -> None:
    """Probabilities that are zero in any float have odds that are not, for the token and all below it."""
    table = np.zeros((1, 4))
    table[0, 1] = 9.0  # 900 nats at temperature 0.01
    claim = Completion(np.array([0], np.uint32), np.zeros(1, np.float32), "length")
    assert replayed(table, claim, 5, own=0.01).margins[0] == pytest.approx(9.0, abs=0.4)


@pytest.mark.parametrize("asked", [None, 0.0, 0.3, 0.7, 2.0])
def test_a_node_that_draws_at_another_temperature_than_asked_is_found(asked: float | None) -> None:
    table = logits(200)
    for own in {None, 0.0, 0.3, 0.7, 2.0} - {asked}:
        measured = replayed(table, drawn(table, 5, own=own), 5, own=asked)
        assert judge(measured, EXACT, 1).outcome is AuditOutcome.HARD, own
    assert judge(replayed(table, drawn(table, 5, own=asked), 5, own=asked), EXACT, 1).outcome is AuditOutcome.PASS


def test_another_seed_or_sample_number_does_not_fit() -> None:
    table = logits(200)
    said = drawn(table, 5, 3)
    assert (replayed(table, said, 5, 3).margins == 0).all()
    for seed, number in ((6, 3), (5, 2)):
        assert (replayed(table, said, seed, number).margins > 0.1).mean() > 0.5


def test_samples_keep_their_numbers_and_places() -> None:
    table = logits(3)
    said = [drawn(table, 9, number) for number in range(2)]
    scored = [score(table, uniforms(9, number, 3), one.tokens.tolist()) for number, one in enumerate(said)]
    measured = joined([measure(said, scored), measure(said[1:], scored[1:], [1])])
    assert measured.sample.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1]
    assert measured.position.tolist() == [0, 1, 2] * 3
    assert (measured.margins == 0).all()
