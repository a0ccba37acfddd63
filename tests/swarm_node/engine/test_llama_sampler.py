"""The numpy sampler against `protocol.work.sampling.pick`, which defines what it must draw."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.work.sampling import pick
from swarm_node.engine.llama.engine import PART, NumpyLogits


def expected(logits: np.ndarray, temperature: float, uniform: float) -> tuple[int, float]:
    scores = logits / np.float32(temperature)
    shifted = scores - scores.max()
    weights = np.exp(shifted)
    token = pick(weights, uniform)
    return token, float(shifted[token] - np.log(weights.sum(dtype=np.float64)))  # a tiny weight has lost its digits


@settings(max_examples=60, deadline=None)
@given(
    vocabulary=st.sampled_from([1, 2, PART - 1, PART, PART + 1, 3 * PART, 5000]),
    spread=st.sampled_from([0.0, 0.1, 3.0, 60.0]),
    uniform=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 0.5, 1 - 2**-53])),
    temperature=st.sampled_from([1.0, 0.3, 2.0]),
    seed=st.integers(0, 1000),
)
def test_it_draws_what_the_definition_draws(
    vocabulary: int, spread: float, uniform: float, temperature: float, seed: int
) -> None:
    logits = (np.random.default_rng(seed).standard_normal((2, vocabulary)) * spread).astype(np.float32)
    tokens, logprobs = NumpyLogits(logits).draw([1.0, temperature], [uniform, uniform])
    for row, heat in enumerate((1.0, temperature)):
        token, logprob = expected(logits[row], heat, uniform)
        assert tokens[row] == token
        assert logprobs[row] == pytest.approx(logprob, abs=1e-4)


def test_a_uniform_on_the_border_of_two_tokens_falls_where_the_definition_says() -> None:
    """All weights are one: the borders are exact, and sums over parts alone could land on either side."""
    logits = np.zeros((1, 4 * PART), np.float32)
    for token in (1, PART - 1, PART, PART + 1, 3 * PART):
        uniform = token / (4 * PART)
        assert (
            NumpyLogits(logits).draw([1.0], [uniform])[0] == [pick(np.ones(4 * PART, np.float32), uniform)] == [token]
        )


def test_a_large_vocabulary_is_drawn_from_in_blocks() -> None:
    logits = np.random.default_rng(1).standard_normal((9, 151_936)).astype(np.float32) * 3
    uniforms = np.random.default_rng(2).random(9).tolist()
    tokens, _ = NumpyLogits(logits).draw([1.0] * 9, uniforms)
    assert tokens == [expected(row, 1.0, uniform)[0] for row, uniform in zip(logits, uniforms, strict=True)]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_distribution_give_nan(bad: float) -> None:
    logits = np.zeros((2, 300), np.float32)
    logits[0, 7] = bad
    _, logprobs = NumpyLogits(logits).draw([1.0, 1.0], [0.5, 0.5])
    assert np.isnan(logprobs[0])
    assert logprobs[1] == pytest.approx(-np.log(300))


def test_tokens_that_are_impossible_are_never_drawn() -> None:
    logits = np.full((1, 1000), -np.inf, np.float32)
    logits[0, [3, 700]] = 0.0
    assert {NumpyLogits(logits).draw([1.0], [uniform])[0][0] for uniform in np.linspace(0, 0.999, 40)} == {3, 700}


def test_the_log_probability_of_given_tokens_is_that_of_the_softmax() -> None:
    logits = np.random.default_rng(4).standard_normal((3, 500)).astype(np.float32)
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    assert NumpyLogits(logits).logprobs([1, 2, 3]) == pytest.approx(exact[[0, 1, 2], [1, 2, 3]], abs=1e-6)
