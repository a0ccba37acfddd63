"""Planning: the paper's own setting comes out, sizes and links decide T_bcast, and the commands say it."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.config import load
from coordinator.reports.planning import NODES_MAX, Inputs, bubble, plan, report, sensitivity, ways

PAPER = Inputs(
    staleness=3,
    groups_per_update=128,
    train_s=1631.2,
    group_s=16 / 0.291,
    broadcast_s=1437,
    node_price_per_hour=0.35,
    learner_price_per_hour=12.24,
    gamma=1.0,
)


def test_the_papers_fleet_comes_out() -> None:
    """Eight RTX 5090 beside four A100: what its headline costs per step says."""
    found = plan(PAPER, "overlap")
    assert (found.kappa, found.age_max, found.nodes) == (2, 3, 8)
    assert found.cost_per_update == pytest.approx((12.24 + 8 * 0.35) * 1631.2 / 3600)


def test_admission_on_the_visible_version_needs_fewer_nodes_for_the_same_learner() -> None:
    assert plan(PAPER).nodes == 5
    assert bubble(PAPER, 5) == 0
    assert bubble(PAPER, 4) > 0


def test_size_and_links_decide_the_broadcast_and_more_nodes_take_longer() -> None:
    measured = replace(PAPER, broadcast_s=None, size_mb=16_380, source_mbit=300, node_mbit=100, load_s=100)
    assert plan(measured, "overlap").broadcast_s == pytest.approx(16_380 * 8 / 100 + 100)
    starved = replace(measured, node_up_mbit=10)
    assert starved.arrival_s(50) > starved.arrival_s(1)


def test_what_no_pool_can_do_is_said_and_which_staleness_would_help() -> None:
    long = replace(PAPER, group_s=2.5 * PAPER.train_s)
    assert plan(long).nodes is None
    enough = report(long, None)["least_staleness"]
    assert plan(replace(long, staleness=enough)).nodes is not None
    assert plan(replace(long, staleness=enough - 1)).nodes is None


def test_a_sensitivity_changes_one_thing() -> None:
    found = sensitivity(PAPER)
    assert found["nodes are dearer by 25%"].nodes == plan(PAPER).nodes
    assert (found["groups take longer by 25%"].nodes or 0) > (plan(PAPER).nodes or 0)
    assert found["S is one larger"].kappa == plan(PAPER).kappa + 1


@given(
    st.integers(0, 12),
    st.floats(1, 1e4),
    st.floats(0.1, 1e4),
    st.floats(0, 1e5),
    st.floats(1, 1e3),
    st.sampled_from(["visible", "overlap"]),
)
def test_a_plan_keeps_the_learner_busy_and_one_node_less_would_break_its_reserve(
    staleness: int, train_s: float, group_s: float, size_mb: float, node_mbit: float, rule: str
) -> None:
    inputs = Inputs(staleness, 64, train_s, group_s, size_mb=size_mb, node_mbit=node_mbit, node_up_mbit=node_mbit / 9)
    found = plan(inputs, "visible" if rule == "visible" else "overlap")
    if found.nodes is None:
        assert found.cost_per_update is None
        return
    assert found.nodes <= NODES_MAX
    assert found.groups_per_s is not None
    assert found.nodes * inputs.node_rate >= 1.1 * found.groups_per_s * (1 - 1e-6)
    assert bubble(inputs, found.nodes, found.rule) == pytest.approx(0, abs=1e-9)


def test_the_modes_beside_each_other() -> None:
    """The paper's five nodes: in turns a step takes what its parts take; without a pause, the rest is in vain."""
    echo2, push_pull, sequential, colocated = ways(PAPER, 5)
    sampling_s = 128 * PAPER.group_s / 5
    assert echo2.step_s == pytest.approx(PAPER.train_s)
    assert (echo2.in_vain, echo2.age_max) == (0.0, 3)
    assert push_pull.step_s == echo2.step_s
    assert push_pull.in_vain == pytest.approx(1 - sampling_s / PAPER.train_s)
    assert sequential.step_s == pytest.approx(1437 + sampling_s + PAPER.train_s)
    assert colocated.step_s == pytest.approx(128 * PAPER.group_s + PAPER.train_s)
    assert colocated.cost_per_update == pytest.approx(12.24 * colocated.step_s / 3600)


OPTIONS = ["examples/demo.toml", "--train-s", "100", "--group-s", "30"]


def test_the_command_prints_a_plan_as_text_and_json() -> None:
    told = CliRunner().invoke(app, ["plan", *OPTIONS, "--broadcast-s", "20", "--nodes", "1"])
    assert told.exit_code == 0, told.output
    assert "visible" in told.output
    assert "With 1 node the learner waits" in told.output
    assert "sequential" in told.output
    found = json.loads(CliRunner().invoke(app, ["plan", *OPTIONS, "--broadcast-s", "20", "--json"]).output)
    assert found["plan"]["visible"]["nodes"] == math.ceil(1.1 * 16 / 100 * 30)


def test_what_has_no_price_costs_nobody_knows_what() -> None:
    words = ["plan", *OPTIONS, "--broadcast-s", "20", "--nodes", "1"]
    unpriced, priced = (CliRunner().invoke(app, [*words, *more]).output for more in ([], ["--node-price", "1"]))
    rows = [line for line in unpriced.splitlines() if line.startswith(("visible", "echo2", "S is one larger"))]
    assert [line for line in rows if not line.endswith(" -")] == []
    assert len(rows) == 3
    assert "--node-price and --learner-price" in unpriced
    assert "--node-price" not in priced


@pytest.mark.parametrize(
    "bad", [["--train-s", "0"], ["--train-s", "nan"], ["--group-s", "-1"], ["--broadcast-s", "inf"]]
)
def test_the_command_refuses_nonsense(bad: list[str]) -> None:
    for command in ("plan", "simulate"):
        assert CliRunner().invoke(app, [command, *OPTIONS, *bad]).exit_code != 0


def test_the_simulation_is_told_as_text_and_json() -> None:
    small = [*OPTIONS, "--nodes", "6", "--updates", "12", "--broadcast-s", "20", "--gamma", "1.1"]
    told = CliRunner().invoke(app, ["simulate", *small])
    assert told.exit_code == 0, told.output
    assert "learner idle" in told.output
    one, again = (CliRunner().invoke(app, ["simulate", *small, "--seed", "3", "--json"]).output for _ in range(2))
    assert one == again
    assert json.loads(one)["updates"] == 12


def test_a_simulation_without_measured_times_says_what_it_assumes_and_how_to_measure_it() -> None:
    words = ["simulate", OPTIONS[0], "--nodes", "8", "--updates", "12"]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0, told.output
    assert "an update takes 60 s (--train-s), and a node samples a group in" in told.stderr
    assert "swarm-coordinator plan examples/demo.toml --live" in told.stderr
    half = CliRunner().invoke(app, [*words, "--train-s", "10", "--json"])
    assert half.stderr.startswith("Assumed: a node samples a group in")
    json.loads(half.stdout)
    assert not CliRunner().invoke(app, [*words, "--train-s", "10", "--group-s", "5"]).stderr


def test_assumed_nodes_give_what_the_learner_needs_also_where_only_the_rounds_own_sample() -> None:
    own = ["simulate", OPTIONS[0], "--set", "fleet.strangers=false", "--set", "fleet.local_nodes=2", "--updates", "12"]
    groups = load(Path(OPTIONS[0]), []).learner.groups_per_update
    assert f"in {60 * 2 / groups:.4g} s (--group-s)" in CliRunner().invoke(app, own).stderr


def test_what_no_pool_can_give_is_null_and_not_infinity() -> None:
    """The learner always waits with S = 0; JSON has no infinity."""
    impossible = [*OPTIONS, "--set", "staleness.max_updates=0", "--set", "staleness.publish_every=0"]
    impossible += ["--nodes", "3", "--updates", "2", "--broadcast-s", "20"]

    def refuse(name: str) -> None:
        raise AssertionError(name)

    found = json.loads(CliRunner().invoke(app, ["simulate", *impossible, "--json"]).output, parse_constant=refuse)
    assert found["least_groups_per_s"] is None
    told = CliRunner().invoke(app, ["simulate", *impossible])
    assert "no pool is enough" in told.output


def test_the_simulation_follows_the_fleets_own_settings() -> None:
    small = [*OPTIONS, "--nodes", "12", "--updates", "30", "--at-once", "8"]
    outcomes = [
        json.loads(CliRunner().invoke(app, ["simulate", *small, *more, "--json"]).output)["working_mean"]
        for more in ([], ["--gamma", "1.1"], ["--set", "fleet.gamma=1.1"], ["--set", "fleet.gamma=1.1", "--gamma", "0"])
    ]
    everybody, asked, configured, overruled = outcomes
    assert asked == configured < everybody == overruled
