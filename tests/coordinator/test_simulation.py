"""The simulated swarm: the same seed is the same run, and what the capacity model foretells comes true."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.fleet import Rules
from coordinator.sim.report import figures, text
from coordinator.sim.scenario import Admission, Pool, Scenario
from coordinator.sim.world import Outcome, Simulation

BOTH: tuple[Admission, ...] = ("visible", "overlap")

SMALL = Scenario(
    staleness=3,
    groups_per_update=64,
    updates=30,
    train_s=100.0,
    broadcast_s=88.0,
    pool=Pool(nodes=4, group_s=5.0),
)

WILD = replace(
    SMALL,
    broadcast_spread=0.5,
    gamma=1.1,
    rules=Rules(window_s=100, dwell_s=300),
    lease_s=100.0,
    pool=Pool(nodes=60, group_s=30.0, at_once=2, speed_spread=0.5, length_spread=0.7, price_spread=0.4, stay_s=2000.0),
)


def run(scenario: Scenario) -> Outcome:
    return Simulation(scenario).run()


def with_rate(scenario: Scenario, groups_per_s: float) -> Scenario:
    pool = scenario.pool
    return replace(scenario, pool=replace(pool, group_s=pool.nodes * pool.at_once / groups_per_s))


def test_the_same_seed_is_the_same_run_and_another_is_not() -> None:
    first, again, other = run(WILD), run(WILD), run(replace(WILD, seed=1))
    assert (first.steps, first.changes, first.spent) == (again.steps, again.changes, again.spent)
    assert first.steps != other.steps


@pytest.mark.parametrize("admission", BOTH)
@pytest.mark.parametrize("times", [0.6, 0.9])
def test_too_few_nodes_let_the_learner_wait_as_long_as_foretold(admission: Admission, times: float) -> None:
    scenario = replace(SMALL, admission=admission)
    slow = with_rate(scenario, times * scenario.rule.min_rate(scenario.load, scenario.interval))
    found = figures(slow, run(slow))
    assert found["bubble"] == pytest.approx(found["bubble_foretold"], abs=0.03)
    assert found["bubble"] > 0.05


@pytest.mark.parametrize("admission", BOTH)
def test_a_little_more_than_the_least_throughput_keeps_the_learner_busy(admission: Admission) -> None:
    scenario = replace(SMALL, admission=admission)
    enough = with_rate(scenario, 1.1 * scenario.rule.min_rate(scenario.load, scenario.interval))
    assert figures(enough, run(enough))["bubble"] < 0.01


def test_without_a_gate_a_large_pool_samples_in_vain_and_with_it_hardly_ever() -> None:
    large = with_rate(SMALL, 3 * 64 / 100.0)
    in_vain = {rule: figures(large, run(replace(large, admission=rule)))["discarded_share"] for rule in BOTH}
    assert in_vain["overlap"] > 0.25
    assert in_vain["visible"] < 0.01


def test_a_synchronous_round_takes_what_its_parts_take() -> None:
    """S = 0: broadcast, sampling and training, one after the other, and nothing is older than its batch."""
    sync = replace(SMALL, staleness=0, updates=10)
    outcome = run(sync)
    between = [
        after.formed_s - before.formed_s for before, after in zip(outcome.steps, outcome.steps[1:], strict=False)
    ]
    assert between == pytest.approx([100 + 88 + 20 * 64 / 16] * 9)
    assert {age for step in outcome.steps for age in step.ages} == {0}
    assert figures(sync, outcome)["bubble_foretold"] == pytest.approx(1 - 100 / between[0])


def test_the_fleet_leaves_the_dear_half_of_a_large_pool_at_home() -> None:
    pool = Pool(nodes=40, group_s=20.0, price_spread=0.8)
    everybody = replace(SMALL, updates=60, pool=pool)
    chosen = replace(everybody, gamma=1.2, rules=Rules(window_s=100, dwell_s=300))
    all_found, found = (figures(scenario, run(scenario)) for scenario in (everybody, chosen))
    assert found["bubble"] < 0.05
    assert found["cost_per_update"] < 0.7 * (all_found["cost_per_update"] - 12.24 * 100 / 3600) + 12.24 * 100 / 3600
    assert found["working_mean"] < 20


def test_a_round_that_publishes_too_rarely_comes_to_a_stop_that_is_told() -> None:
    scenario = replace(SMALL, staleness=2, kappa=5)
    outcome = run(scenario)
    assert "came to a stop" in text(scenario, figures(scenario, outcome))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    staleness=st.integers(0, 5),
    kappa=st.integers(1, 6),
    broadcast_s=st.floats(0, 300),
    nodes=st.integers(1, 12),
    at_once=st.integers(1, 3),
    stay_s=st.sampled_from([math.inf, 500.0]),
    gamma=st.sampled_from([0.0, 1.1]),
)
def test_whatever_the_swarm_nothing_too_old_is_trained_on_and_the_round_ends(
    seed: int, staleness: int, kappa: int, broadcast_s: float, nodes: int, at_once: int, stay_s: float, gamma: float
) -> None:
    scenario = Scenario(
        staleness=staleness,
        kappa=min(kappa, staleness + 1),
        groups_per_update=8,
        updates=12,
        broadcast_s=broadcast_s,
        broadcast_spread=0.5,
        lease_s=200.0,
        gamma=gamma,
        seed=seed,
        pool=Pool(nodes=nodes, group_s=30.0, at_once=at_once, speed_spread=0.5, length_spread=1.0, stay_s=stay_s),
    )
    outcome = run(scenario)
    assert len(outcome.steps) == scenario.updates
    assert all(max(step.ages) <= staleness for step in outcome.steps)
    assert all(step.ages.total() == scenario.groups_per_update for step in outcome.steps)
