"""The capacity model: what the reference derives, and what must hold for any load."""

import math
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from coordinator.rules.capacity import OVERLAP, VISIBLE, AdmissionRule, PoolLoad, least_staleness, staleness_bound

PAPER = PoolLoad(staleness=3, rollouts_per_update=2048, train_s=1631.2, broadcast_s=1437)
"""ECHO-2's own setting: r = 0.88."""

seconds = st.floats(0.01, 1e5)
loads = st.builds(
    PoolLoad,
    staleness=st.integers(0, 12),
    rollouts_per_update=st.floats(1, 1e5),
    train_s=seconds,
    broadcast_s=seconds,
    rollout_s=st.floats(0, 1e5),
)
rules = st.sampled_from([OVERLAP, VISIBLE])
rates = st.floats(1e-3, 1e5)


@pytest.mark.parametrize(("kappa", "times"), [(2, 1.786), (3, 1.415), (5, 1.214), (10, 1.096)])
def test_least_throughput_of_the_paper_for_its_broadcast_time(kappa: int, times: float) -> None:
    load = replace(PAPER, train_s=1000.0, broadcast_s=880.0)
    assert OVERLAP.min_rate(load, kappa) * load.train_s / load.rollouts_per_update == pytest.approx(times, abs=1e-3)


@pytest.mark.parametrize(("staleness", "kappa"), [(1, 1), (3, 2), (4, 3), (6, 5), (11, 10)])
def test_the_papers_default_interval_follows_when_a_broadcast_is_shorter_than_an_update(
    staleness: int, kappa: int
) -> None:
    assert OVERLAP.kappa(replace(PAPER, staleness=staleness)) == kappa


def test_a_slow_broadcast_makes_the_interval_shorter_than_the_papers_default() -> None:
    load = replace(PAPER, staleness=6, broadcast_s=2.5 * PAPER.train_s)
    assert staleness_bound(load, 5) == 7
    assert (OVERLAP.kappa(load), staleness_bound(load, 4)) == (4, 6)


def test_the_papers_wait_without_peers() -> None:
    """Table 2, nine machines: 131.9 s of waiting in a period of two updates."""
    load = replace(PAPER, broadcast_s=1830.0)
    rate = 2 * 2048 / 1564.3
    assert OVERLAP.period_s(load, 2, rate) - 2 * load.train_s == pytest.approx(131.9, abs=0.1)


def test_visible_admission_needs_no_more_than_the_learner_consumes() -> None:
    assert VISIBLE.kappa(PAPER) == 2
    assert VISIBLE.min_rate(PAPER, 2) == pytest.approx(2048 / 1631.2)
    assert VISIBLE.min_rate(PAPER, 2) < 0.57 * OVERLAP.min_rate(PAPER, 2)


def test_staleness_zero_is_the_synchronous_loop() -> None:
    load = PoolLoad(staleness=0, rollouts_per_update=60, train_s=10, broadcast_s=3)
    assert VISIBLE.kappa(load) == 1
    assert VISIBLE.period_s(load, 1, rate=2.0) == 10 + 3 + 60 / 2


def test_everything_from_one_version_is_sampled_batch_by_batch_while_the_learner_works() -> None:
    """S = 2, κ = 3: all three batches come from one version; slow sampling then decides, fast sampling hides."""
    load = PoolLoad(staleness=2, rollouts_per_update=60, train_s=10, broadcast_s=3)
    assert VISIBLE.period_s(load, 3, rate=60 / 5) == 3 + 5 + 3 * 10
    assert VISIBLE.period_s(load, 3, rate=60 / 20) == 3 + 3 * 20 + 10


def test_rollouts_longer_than_the_bound_allows_cannot_be_bought_away() -> None:
    """A longer S helps, more nodes do not."""
    load = replace(PAPER, rollout_s=2.1 * PAPER.train_s)
    assert VISIBLE.min_rate(load, 2) == math.inf
    assert VISIBLE.bubble(load, 2, 1e9) > 0
    enough = replace(load, staleness=least_staleness(load))
    assert VISIBLE.bubble(enough, 1, VISIBLE.min_rate(enough, 1)) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("name", ["train_s", "broadcast_s", "rollout_s", "rollouts_per_update"])
def test_a_load_of_nonsense_is_refused(name: str, bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        replace(PAPER, **cast(Any, {name: bad}))


def test_no_throughput_keeps_no_learner_busy() -> None:
    for rule in (OVERLAP, VISIBLE):
        assert rule.bubble(PAPER, 2, 0.0) == 1.0


@given(rules, loads, st.integers(1, 13), rates, rates)
def test_more_throughput_never_costs_time(
    rule: AdmissionRule, load: PoolLoad, kappa: int, one: float, other: float
) -> None:
    slow, fast = sorted((one, other))
    assert rule.period_s(load, kappa, fast) <= rule.period_s(load, kappa, slow) * (1 + 1e-12)


@given(rules, loads, st.integers(1, 13), st.floats(1.0001, 10))
def test_the_learner_waits_exactly_below_the_least_throughput(
    rule: AdmissionRule, load: PoolLoad, kappa: int, times: float
) -> None:
    rate = rule.min_rate(load, kappa)
    assume(rate < math.inf)
    assert rule.bubble(load, kappa, rate * times) == pytest.approx(0, abs=1e-9)
    assert rule.bubble(load, kappa, rate / times) > 0


@given(loads, st.integers(1, 13))
def test_where_no_throughput_is_enough_the_learner_waits_at_any(load: PoolLoad, kappa: int) -> None:
    for rule in (OVERLAP, VISIBLE):
        if rule.min_rate(load, kappa) == math.inf:
            assert rule.period_s(load, kappa, 1e15) > kappa * load.train_s * (1 - 1e-9)


@given(rules, loads)
def test_the_chosen_interval_is_the_largest_that_holds(rule: AdmissionRule, load: PoolLoad) -> None:
    kappa = rule.kappa(load)
    assert 1 <= kappa <= load.staleness + 1
    assert kappa == 1 or rule.holds(load, kappa)
    assert not any(rule.holds(load, larger) for larger in range(kappa + 1, load.staleness + 2))


@given(loads)
def test_the_smallest_sufficient_staleness_is_just_that(load: PoolLoad) -> None:
    least = least_staleness(load)
    assume(least < 1e6)
    assert VISIBLE.holds(replace(load, staleness=least), 1)
    assert not VISIBLE.holds(replace(load, staleness=least - 1), 1)
