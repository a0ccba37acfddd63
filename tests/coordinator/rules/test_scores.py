"""avg@k and pass@k against counting by hand, and against drawing."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rules.scores import pass_at, result, wilson


def test_two_problems_by_hand() -> None:
    found = result([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]], solved=1.0)
    assert found is not None
    assert found.average == pytest.approx(3 / 8)
    assert found.passed == pytest.approx({1: 3 / 8, 2: (1 / 2 + 5 / 6) / 2, 4: 1.0})
    assert (found.problems, found.samples) == (2, 4)


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_j_is_the_share_of_all_draws_of_j_with_a_right_one(right: list[bool], data: st.DataObject) -> None:
    j = data.draw(st.integers(1, len(right)))
    draws = list(combinations(right, j))
    assert pass_at(len(right), sum(right), j) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_1_is_the_share_of_right_samples_whatever_the_scores() -> None:
    found = result([[3.0, -1.0, 3.0]], solved=2.0)
    assert found is not None
    assert found.passed[1] == pytest.approx(2 / 3)
    assert found.average == pytest.approx(5 / 3)


def test_a_problem_that_had_fewer_samples_bounds_k() -> None:
    found = result([[1.0] * 4, [0.0] * 3], solved=1.0)
    assert found is not None
    assert found.samples == 3
    assert set(found.passed) == {1, 2, 3}


def test_all_solved_is_not_certainty() -> None:
    found = result([[1.0, 1.0]] * 16, solved=1.0)
    assert found is not None
    assert found.average == 1.0
    low, high = found.interval
    assert low == pytest.approx(16 / (16 + 1.959964**2), abs=1e-6)
    assert high == 1.0


def test_scores_beyond_one_have_the_interval_of_their_spread() -> None:
    found = result([[4.0], [8.0]], solved=1.0)
    assert found is not None
    assert found.interval == pytest.approx((6 - 1.959964 * 2, 6 + 1.959964 * 2))


def test_nothing_measured_is_no_result() -> None:
    assert result([], solved=1.0) is None


@given(st.integers(1, 500), st.data())
def test_an_interval_holds_its_share_and_narrows_with_the_tries(tries: int, data: st.DataObject) -> None:
    share = data.draw(st.integers(0, tries)) / tries
    low, high = wilson(share * tries, tries) or (1.0, 0.0)
    assert 0.0 <= low <= share + 1e-12
    assert share - 1e-12 <= high <= 1.0
    half = 1 + tries // 2
    low_of_fewer, high_of_fewer = wilson(share * half, half) or (1.0, 0.0)
    assert high - low <= high_of_fewer - low_of_fewer + 1e-12
