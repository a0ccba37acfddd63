"""The simulated swarm: the same seed is the same run, and what the capacity model foretells comes true."""

import math
from dataclasses import replace
from pathlib import Path
from random import Random
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.config import AuditSection, load
from coordinator.rules.fleet_choice import FleetRules
from coordinator.rules.topology import NodeLinks, plan
from coordinator.sim.machines import SimulatedNode, SimulatedSpread, depths, draw_links, make_node
from coordinator.sim.report import SimulationOutcome, draw, figures, text
from coordinator.sim.scenario import BYTES_PER_MBIT, Admission, Links, Scenario, SimulatedPool, scenario_of
from coordinator.sim.world import Simulation
from protocol.policy.chunks import fitting_size

BOTH: tuple[Admission, ...] = ("visible", "overlap")

SMALL = Scenario(
    staleness=3,
    groups_per_update=64,
    updates=30,
    train_s=100.0,
    broadcast_s=88.0,
    pool=SimulatedPool(nodes=4, group_s=5.0),
)

WILD = replace(
    SMALL,
    broadcast_spread=0.5,
    gamma=1.1,
    rules=FleetRules(window_s=100, dwell_s=300),
    lease_s=100.0,
    pool=SimulatedPool(
        nodes=60, group_s=30.0, at_once=2, speed_spread=0.5, length_spread=0.7, price_spread=0.4, stay_s=2000.0
    ),
)


def run(scenario: Scenario) -> SimulationOutcome:
    return Simulation(scenario).run()


def with_rate(scenario: Scenario, groups_per_s: float) -> Scenario:
    pool = scenario.pool
    return replace(scenario, pool=replace(pool, group_s=pool.nodes * pool.at_once / groups_per_s))


def test_the_same_seed_is_the_same_run_and_another_is_not() -> None:
    first, again, other = run(WILD), run(WILD), run(replace(WILD, seed=1))
    assert (first.steps, first.changes, first.spent) == (again.steps, again.changes, again.spent)
    assert first.steps != other.steps
    assert first.trace == again.trace != other.trace


class Watched(Simulation):
    """Looks at every lease that is begun, as the real agent's loop would have it."""

    def _start(self, node: SimulatedNode) -> int:
        held, behind = {lease.update for lease in node.out}, node.fetched > node.update
        begun = super()._start(node)
        assert not (begun and held and behind), "nothing is added to what keeps a newer version out of the engine"
        assert len({lease.update for lease in node.out}) <= 1, "an engine holds one version"
        return begun


@pytest.mark.parametrize("admission", BOTH)
def test_a_node_asks_and_changes_its_version_when_real_agents_do(admission: Admission) -> None:
    outcome = Watched(replace(WILD, gamma=0.0, admission=admission)).run()
    assert len(outcome.steps) == WILD.updates


def test_an_engine_that_loads_for_long_samples_nothing_meanwhile() -> None:
    links = Links(size_mb=100.0, source_mbit=100.0, node_mbit=100.0, node_up_mbit=100.0)
    scenario = replace(SMALL, kappa=1, groups_per_update=16, pool=SimulatedPool(nodes=1, group_s=10.0))
    steps_s = [
        figures(scenario, run(scenario))["step_s"]
        for scenario in (replace(scenario, links=replace(links, load_s=load_s)) for load_s in (0.0, 40.0))
    ]
    assert steps_s == pytest.approx([160.0, 200.0], rel=0.02)


def test_the_machines_may_be_named() -> None:
    drawn = [make_node(number, WILD, Random(7)) for number in range(WILD.pool.nodes)]
    again = [make_node(number, WILD, Random(7)) for number in range(WILD.pool.nodes)]
    assert Simulation(WILD, drawn).run().trace == Simulation(WILD, again).run().trace != run(WILD).trace


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
    pool = SimulatedPool(nodes=40, group_s=20.0, price_spread=0.8)
    everybody = replace(SMALL, updates=60, pool=pool)
    chosen = replace(everybody, gamma=1.2, rules=FleetRules(window_s=100, dwell_s=300))
    all_found, found = (figures(scenario, run(scenario)) for scenario in (everybody, chosen))
    assert found["bubble"] < 0.05
    assert found["cost_per_update"] < 0.7 * (all_found["cost_per_update"] - 12.24 * 100 / 3600) + 12.24 * 100 / 3600
    assert found["working_mean"] < 20


def test_a_round_that_publishes_too_rarely_comes_to_a_stop_that_is_told() -> None:
    scenario = replace(SMALL, staleness=2, kappa=5)
    outcome = run(scenario)
    assert "The round stalled" in text(scenario, figures(scenario, outcome))


HARD = replace(
    SMALL,
    broadcast_spread=0.5,
    lease_s=400.0,
    over_issue=4,
    continues=True,
    lookahead=16,
    pool=SimulatedPool(
        nodes=40,
        group_s=40.0,
        speed_spread=0.5,
        length_spread=0.8,
        foresight=0.7,
        preempt_s=600.0,
        away_s=300.0,
        liars=0.2,
    ),
    links=Links(size_mb=100.0, spread=0.5, load_s=1.0),
)


def test_the_same_seed_is_the_same_run_of_everything_at_once() -> None:
    assert run(HARD).trace == run(HARD).trace
    assert run(HARD).trace != run(replace(HARD, seed=1)).trace


def mean_step_s(scenario: Scenario) -> float:
    found = [figures(one, run(one)) for one in (replace(scenario, seed=seed) for seed in range(3))]
    return sum(float(one["step_s"]) for one in found) / len(found)


def test_long_groups_on_fast_nodes_shorten_a_synchronous_step() -> None:
    """Lengths of a heavy tail, mostly expected: the batch waits no more for a long group on a slow node."""
    pool = SimulatedPool(nodes=32, group_s=60.0, speed_spread=0.8, length_spread=0.8, foresight=0.8)
    plain = replace(SMALL, staleness=0, updates=30, broadcast_s=20.0, lease_s=3000.0, pool=pool)
    assert mean_step_s(replace(plain, lookahead=64)) < 0.85 * mean_step_s(plain)


def test_without_foresight_the_order_changes_nothing_much() -> None:
    pool = SimulatedPool(nodes=32, group_s=60.0, speed_spread=0.8, length_spread=0.8)
    plain = replace(SMALL, staleness=0, updates=30, broadcast_s=20.0, lease_s=3000.0, pool=pool)
    assert mean_step_s(replace(plain, lookahead=64)) == pytest.approx(mean_step_s(plain), rel=0.02)


def test_late_groups_given_to_a_second_node_shorten_a_synchronous_step() -> None:
    pool = SimulatedPool(nodes=64, group_s=60.0, speed_spread=0.8, length_spread=0.8)
    plain = replace(SMALL, staleness=0, updates=30, broadcast_s=20.0, lease_s=3000.0, pool=pool)
    assert mean_step_s(replace(plain, over_issue=8)) < 0.85 * mean_step_s(plain)
    assert run(replace(plain, over_issue=8)).helped > 0


def test_what_preempted_nodes_told_is_gone_on_with_and_less_is_lost() -> None:
    pool = SimulatedPool(nodes=64, group_s=200.0, preempt_s=500.0, away_s=100.0)
    plain = replace(SMALL, staleness=6, broadcast_s=20.0, lease_s=1000.0, pool=pool)
    afresh, gone_on = run(plain), run(replace(plain, continues=True))
    assert afresh.continued == 0 < gone_on.continued
    assert sum(gone_on.discarded.values()) < 0.7 * sum(afresh.discarded.values())


def test_a_lease_that_takes_too_long_is_given_to_somebody_else_while_its_node_lives() -> None:
    pool = SimulatedPool(nodes=8, group_s=30.0, length_spread=1.0)
    outcome = run(replace(SMALL, lease_s=60.0, updates=15, pool=pool))
    assert outcome.discarded["not done in the lease's time"] > 0
    assert len(outcome.steps) == 15


def test_forgers_are_found_and_banned_and_little_of_theirs_is_trained_on() -> None:
    pool = SimulatedPool(nodes=40, group_s=40.0, liars=0.2)
    outcome = run(replace(SMALL, updates=60, pool=pool, audits=AuditSection()))
    liars = sum(node.lies for node in Simulation(replace(SMALL, pool=pool))._nodes)
    assert outcome.banned == liars > 0
    assert outcome.trained_forged < 0.01 * 60 * 64
    unwatched = replace(SMALL, updates=60, pool=pool, audits=AuditSection(first_groups=0, floor=0.0, trusted_floor=0.0))
    assert run(unwatched).trained_forged > 10 * max(1, outcome.trained_forged)


def test_versions_travel_by_the_real_trees() -> None:
    """Equal links: everybody has it when the fluid bound says, and one chunk for each hop."""
    links = Links(size_mb=125.0, source_mbit=1000.0, node_mbit=100.0, node_up_mbit=100.0, load_s=2.0)
    scenario = replace(SMALL, links=links, pool=SimulatedPool(nodes=50, group_s=50.0))
    foretold = scenario.load.broadcast_s
    assert foretold == pytest.approx(12.0)
    spreads = run(scenario).spreads_s
    assert spreads
    assert all(foretold <= spread_s <= 1.2 * foretold for spread_s in spreads)
    starved = replace(scenario, links=replace(links, node_up_mbit=1.0, source_mbit=100.0))
    assert min(run(starved).spreads_s) > 3 * max(spreads)


@given(st.integers(1, 60), st.floats(1e5, 1e9), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_depths_are_those_of_the_planned_trees(count: int, source_up: float, seed: int) -> None:
    chance = Random(seed)
    nodes = [NodeLinks(f"n{n}", chance.uniform(1e4, 1e8), chance.uniform(1e5, 1e8)) for n in range(count)]
    topology = plan(source_up, nodes)
    assert depths(topology) == {node.name: topology.hops(node.name) for node in nodes}


def test_a_replay_buffer_samples_in_vain_what_admission_never_starts() -> None:
    large = with_rate(SMALL, 3 * 64 / 100.0)
    found = figures(large, run(replace(large, admission="buffer")))
    assert found["discarded_share"] > 0.2
    assert found["age_max"] <= large.staleness
    assert found["bubble"] < 0.02


def test_what_the_learner_finds_too_old_is_counted_once() -> None:
    scenario = replace(SMALL, staleness=1, admission="buffer", pool=SimulatedPool(nodes=20, group_s=5.0))
    outcome = run(scenario)
    vain, trained = sum(outcome.discarded.values()), scenario.updates * scenario.groups_per_update
    assert outcome.discarded["too old when the learner came"] > 100
    assert figures(scenario, outcome)["discarded_share"] == pytest.approx(vain / (vain + trained))


def test_a_chunk_crosses_each_hop_as_a_whole_at_the_pace_of_its_stripe() -> None:
    links = Links(size_mb=4.0, source_mbit=6.0, node_mbit=6.0, node_up_mbit=3.0, hear_s=0.5)
    nodes = [draw_links(Random(0), f"node-{number}", links) for number in range(6)]
    spread, topology = SimulatedSpread(links), plan(6.0 * BYTES_PER_MBIT, nodes)
    spread.publish(nodes)
    hops, chunk_s = max(depths(topology).values()), fitting_size(4_000_000) * topology.stripes / topology.rate
    assert hops > 1
    assert max(map(spread.delay_s, nodes)) == pytest.approx(0.5 + 4e6 / topology.rate + (hops - 1) * chunk_s)


def test_a_mode_of_a_round_is_simulated_by_its_settings() -> None:
    pool = SimulatedPool(nodes=50)
    echo2, push_pull, sequential, colocated = (
        scenario_of(load(None, [f"round.mode={mode}"]), pool)
        for mode in ("echo2", "push-pull", "sequential", "colocated")
    )
    assert (echo2.admission, echo2.staleness) == ("visible", 4)
    assert (push_pull.admission, push_pull.room) == ("buffer", 10)
    assert (sequential.staleness, sequential.interval, sequential.pool.nodes) == (0, 1, 50)
    assert (colocated.staleness, colocated.interval, colocated.pool.nodes) == (0, 1, 1)


def test_a_run_is_drawn(tmp_path: Path) -> None:
    drawn = draw(run(replace(HARD, updates=8)), tmp_path / "new")
    assert len(drawn) == 3
    for path in drawn:
        assert ElementTree.fromstring(path.read_text()).tag.endswith("svg")
    assert draw(run(replace(SMALL, updates=1)), tmp_path), "even where there is no curve yet"


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    staleness=st.integers(0, 5),
    kappa=st.integers(1, 6),
    broadcast_s=st.floats(0, 300),
    nodes=st.integers(1, 12),
    at_once=st.integers(1, 3),
    stay_s=st.sampled_from([math.inf, 500.0]),
    gamma=st.sampled_from([0.0, 1.1]),
    admission=st.sampled_from(["visible", "buffer"]),
    rescue=st.booleans(),
    liars=st.sampled_from([0.0, 0.3]),
)
def test_whatever_the_swarm_nothing_too_old_is_trained_on_and_the_round_ends(
    seed: int,
    staleness: int,
    kappa: int,
    broadcast_s: float,
    nodes: int,
    at_once: int,
    stay_s: float,
    gamma: float,
    admission: Admission,
    rescue: bool,
    liars: float,
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
        admission=admission,
        over_issue=2 * rescue,
        continues=rescue,
        lookahead=8 * rescue,
        pool=SimulatedPool(
            nodes=nodes,
            group_s=30.0,
            at_once=at_once,
            speed_spread=0.5,
            length_spread=1.0,
            foresight=0.5 * rescue,
            stay_s=stay_s,
            preempt_s=700.0 if rescue else math.inf,
            liars=liars,
        ),
    )
    outcome = run(scenario)
    everybody_is_banned = outcome.banned == nodes
    assert len(outcome.steps) == scenario.updates or everybody_is_banned
    assert all(max(step.ages) <= staleness for step in outcome.steps)
    assert all(step.ages.total() == scenario.groups_per_update for step in outcome.steps)
