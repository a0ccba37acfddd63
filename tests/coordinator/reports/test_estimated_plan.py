"""A plan from names alone: ranges with sources, ECHO-2's own figures where its setting is met, and named refusals."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.config import parse
from coordinator.reports import estimated_plan
from coordinator.reports.estimated_plan import ECHO2_TRAIN_S, Wanted
from coordinator.rules import hardware
from protocol.errors import ConfigInvalid

GIB = 2**30
CONFIG = parse({"learner": {"groups_per_update": 64}, "sampling": {"samples_per_group": 8}})
WANTED = Wanted(
    model="Qwen/Qwen3-4B",
    shape=hardware.find_shape("Qwen/Qwen3-4B"),
    task="math",
    node_card="4090",
    nodes=8,
    node_bytes=22 * GIB,
    learner_card="h100",
    learners=1,
    prompt_tokens=150,
    completion_tokens=(300.0, 2000.0),
    source_mbit=1000.0,
    node_mbit=100.0,
    node_price=0.4,
    learner_price=2.5,
    gamma=1.1,
)


def test_every_estimate_is_a_range_with_its_source() -> None:
    found = estimated_plan.report(WANTED, CONFIG)
    for value in (found["train_s"], found["node"]["tokens_per_s"], found["broadcast_s"]):
        assert 0 < value["low"] < value["middle"] < value["high"]
        assert value["source"]
    assert "nothing was measured on this card" in found["train_s"]["source"]
    assert found["nodes_needed"]["low"] <= found["nodes_needed"]["middle"]
    assert found["cost_per_hour"] == pytest.approx(2.5 + 8 * 0.4)
    steps, cost = found["steps_per_hour"], found["cost_per_step"]
    assert cost["low"] == pytest.approx(found["cost_per_hour"] / steps["high"])
    assert cost["high"] == pytest.approx(found["cost_per_hour"] / steps["low"])


def test_a_faster_learner_trains_faster_and_needs_more_nodes() -> None:
    one, four = (estimated_plan.report(replace(WANTED, learners=count), CONFIG) for count in (1, 4))
    assert four["train_s"]["middle"] == pytest.approx(one["train_s"]["middle"] / 4)
    assert four["nodes_needed"]["low"] > one["nodes_needed"]["low"]


def test_echo2s_own_setting_uses_what_it_measured() -> None:
    config = parse({"learner": {"groups_per_update": 128}, "sampling": {"samples_per_group": 16}})
    shape = hardware.find_shape("Qwen/Qwen3-8B")
    wanted = replace(WANTED, model="Qwen/Qwen3-8B", shape=shape, learner_card="a100", learners=4, node_card="5090")
    found = estimated_plan.report(replace(wanted, node_bytes=30 * GIB), config)
    assert (found["train_s"]["low"], found["train_s"]["high"]) == (ECHO2_TRAIN_S, ECHO2_TRAIN_S)
    assert "measured by ECHO-2" in found["train_s"]["source"]
    assert 1310 < found["whole_version_s"] < 1660, "the paper measured 1437 s, with loading"


def test_nodes_that_cannot_hold_the_model_are_refused() -> None:
    shape = hardware.find_shape("Qwen/Qwen3-14B")
    with pytest.raises(ConfigInvalid, match="does not fit on a 4090"):
        estimated_plan.report(replace(WANTED, shape=shape), CONFIG)


def test_a_task_of_unknown_length_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigInvalid) as refused:
        estimated_plan.lengths("poker")
    assert "math" in refused.value.hint


def test_the_command_needs_names_only() -> None:
    words = [
        "plan",
        "--model",
        "HuggingFaceTB/SmolLM2-135M",
        "--task",
        "math",
        "--nodes",
        "4090:2",
        "--learner",
        "h100:1",
    ]
    done = CliRunner().invoke(app, [*words, "--completion-tokens", "200", "--node-price", "0.3", "--json"])
    assert done.exit_code == 0, done.exception
    found = json.loads(done.output)
    assert found["learner"]["fits"]
    assert found["task"]["completion_tokens"]["source"] == "given"
    assert found["model"]["parameters"] == 134_515_008


@pytest.mark.parametrize(
    ("changed", "hint"),
    [
        (("--model", "nobody/nothing"), "qwen/qwen3-4b"),
        (("--nodes", "9999:2"), "4090"),
        (("--learner", "x100:1"), "h100"),
        (("--task", "poker"), "math"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(changed: tuple[str, str], hint: str) -> None:
    words = {"--model": "Qwen/Qwen3-4B", "--task": "math", "--nodes": "4090:8", "--learner": "h100:1"} | dict([changed])
    done = CliRunner().invoke(app, ["plan", *(word for pair in words.items() for word in pair)])
    assert isinstance(done.exception, ConfigInvalid)
    assert hint in done.exception.hint
