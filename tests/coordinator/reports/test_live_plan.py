"""The plan of a running round: whom to keep, what it costs, and what each thing that is measured does to it."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.reports.live_plan import MICROS, Live, advise, live, report, sensitivity, text
from coordinator.rules.capacity import VISIBLE, PoolLoad
from coordinator.rules.fleet_choice import FleetCandidate
from protocol.errors import Unreachable
from tests.coordinator.served import serve

LOAD = PoolLoad(staleness=3, rollouts_per_update=100, train_s=100.0, broadcast_s=20.0, rollout_s=10.0)
NODES = [FleetCandidate(f"n{number}", 0.2, (1 + number) * MICROS / 3600) for number in range(10)]
NOW = Live(LOAD, kappa=0, gamma=1.1, nodes=NODES)


def test_the_cheapest_that_are_enough_are_kept() -> None:
    """The learner needs one group a second: six nodes of 0.2, which ask 1 to 6 an hour."""
    found = advise(NOW)
    assert (found.nodes, found.groups_per_s, found.idle) == (6, 1.0, 0.0)
    assert found.step_s == pytest.approx(100)
    assert found.cost_per_update == pytest.approx(21 / 36)


def test_where_all_are_too_few_everybody_is_kept_and_the_learner_waits() -> None:
    found = advise(replace(NOW, nodes=NODES[:4]))
    assert found.nodes == 4
    assert found.idle == pytest.approx(0.2)
    assert found.step_s == pytest.approx(125)


def test_what_cannot_be_is_said_and_which_bound_would_help() -> None:
    slow = replace(NOW, load=replace(LOAD, staleness=0))
    assert advise(slow).groups_per_s is None
    assert "Use S = 2 or more" in text(report(slow))
    nobody = report(replace(NOW, nodes=[]))
    assert nobody["plan"]["cost_per_update"] is None
    json.dumps(nobody, allow_nan=False)
    assert "-" in text(nobody)


@pytest.mark.parametrize("rate", [1e-12, 1e-303, 5e-324])
def test_a_node_that_claims_next_to_nothing_makes_no_update_last_for_ages(rate: float) -> None:
    found = report(replace(NOW, nodes=[FleetCandidate("snail", rate, MICROS)]))
    json.dumps(found, allow_nan=False)
    for plan in (found["plan"], *found["by_staleness"], *found["sensitivity"].values()):
        assert (plan["step_s"], plan["cost_per_update"]) == (None, None)
        assert plan["idle"] == pytest.approx(1)


def test_each_sensitivity_changes_its_own_thing() -> None:
    here, found = advise(NOW), sensitivity(replace(NOW, learner_cost=MICROS / 36))
    plain = advise(replace(NOW, learner_cost=MICROS / 36))
    assert found["an update takes longer by 25%"].nodes < here.nodes
    assert found["groups take longer by 25%"].nodes > here.nodes
    assert found["the fastest node leaves"].nodes == here.nodes
    assert found["S is one larger"].kappa > here.kappa
    for name in ("nodes are dearer by 25%", "the learner is dearer by 25%"):
        assert (found[name].cost_per_update or 0) > (plain.cost_per_update or 0), name


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 1e6)), max_size=12),
    st.integers(0, 6),
    st.floats(0, 1e4),
    st.floats(0, 1e4),
)
@example([(5.642393673853142e-304, 93.0)], 0, 0.0, 0.0)
def test_whatever_is_measured_is_told_in_numbers(
    nodes: list[tuple[float, float]], staleness: int, broadcast_s: float, rollout_s: float
) -> None:
    load = replace(LOAD, staleness=staleness, broadcast_s=broadcast_s, rollout_s=rollout_s)
    pool = [FleetCandidate(f"n{number}", rate, cost) for number, (rate, cost) in enumerate(nodes)]
    found = report(Live(load, 0, 1.1, pool))
    json.dumps(found, allow_nan=False)
    text(found)
    kept = found["plan"]
    if kept["groups_per_s"] is not None and math.fsum(one.rate for one in pool) >= 1.1 * kept["groups_per_s"]:
        assert kept["idle"] == pytest.approx(0, abs=1e-9)
        assert VISIBLE.min_rate(load, kept["kappa"]) <= kept["given_per_s"] * (1 + 1e-9)


def test_what_a_coordinator_answers_is_understood() -> None:
    answer = {
        "load": {"staleness": 3, "rollouts_per_update": 100, "train_s": 100.0, "broadcast_s": 20.0, "rollout_s": 10.0},
        "publish_every": 2,
        "gamma": 0.0,
        "nodes": [{"name": "a", "groups_per_s": 0.5, "cost_micros_per_s": 3.0}],
    }
    now = live(answer, 1.2, 3.6)
    assert now == Live(LOAD, 2, 1.2, [FleetCandidate("a", 0.5, 3.0)], learner_cost=1000.0)


@pytest.mark.asyncio
async def test_the_operator_alone_is_told_what_is_measured(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        assert (await served.client.get("/v1/measured")).status == 401
        answer = await served.client.get("/v1/measured", headers=served.operator)
        found = await answer.json()
    assert found == {"load": None, "publish_every": 0, "gamma": 0.0, "nodes": []}


def test_the_command_needs_figures_or_a_running_round(tmp_path: Path) -> None:
    place = ["--set", f"round.directory={tmp_path}", "--set", "round.listen=127.0.0.1:1"]
    asked = CliRunner().invoke(app, ["plan", "examples/demo.toml", *place])
    assert asked.exit_code == 2
    assert "--gpu 4090:1 (does the learner fit)" in " ".join(asked.output.split())
    nobody = CliRunner().invoke(app, ["plan", "examples/demo.toml", *place, "--live"])
    assert isinstance(nobody.exception, Unreachable)
