"""A plan from names alone: ranges with sources, ECHO-2's own figures where its setting is met, and named refusals.

The share of the nodes' work that an auditor can replay, by stated speeds.
"""

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.config import Config, parse
from coordinator.reports import estimated_plan
from coordinator.reports.estimated_plan import ECHO2_TRAIN_S, AuditLoad, Range, Wanted
from coordinator.rules import hardware
from coordinator.rules.hardware import FLOAT32_TFLOPS, SPEEDS, find_shape
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


LOAD = AuditLoad(
    shape=find_shape("HuggingFaceTB/SmolLM2-135M"),
    card="h100",
    threads=1,
    nodes=4,
    prompt_tokens=20,
    completion_tokens=(48.0, 48.0, 48.0),
    delivered=Range(100, 200, 400),
)


def round_of(**audit: Any) -> Config:
    return parse({"audit": audit, "sampling": {"samples_per_group": 8}})


def test_the_speed_on_a_thread_is_what_the_bench_measured() -> None:
    """258 tokens/s for one replay of SmolLM2-135M on one thread (bench/RESULTS.md, what audits cost)."""
    found = estimated_plan.audit_report(round_of(neighbours=0), LOAD)["tokens_per_s"]
    assert found["high"] == pytest.approx(258, rel=0.1)
    assert "70 GFLOP/s" in found["source"]


def test_a_second_replay_halves_the_speed_and_a_second_thread_doubles_it() -> None:
    once = estimated_plan.audit_report(round_of(neighbours=0), LOAD)["tokens_per_s"]["high"]
    assert estimated_plan.audit_report(round_of(), LOAD)["tokens_per_s"]["high"] == pytest.approx(once / 2)
    assert estimated_plan.audit_report(round_of(), replace(LOAD, threads=2))["tokens_per_s"]["high"] == pytest.approx(
        once
    )


def test_an_auditor_that_does_not_keep_up_is_told_with_the_rate_that_it_holds_and_the_next_step() -> None:
    slow = replace(LOAD, delivered=Range(10_000, 20_000, 40_000))
    found = estimated_plan.audit_report(round_of(), slow)
    said = "\n".join(estimated_plan.audit_lines(found))
    assert not found["keeps_up"]
    assert f"{found['rate_held']['middle']:.1%}" in said
    assert "IT DOES NOT KEEP UP" in said
    assert "audit.device" in said
    on_card = estimated_plan.audit_report(round_of(device="cuda:1"), slow)
    assert on_card["keeps_up"]
    assert "it keeps up" in "\n".join(estimated_plan.audit_lines(on_card))


def test_a_round_without_audits_needs_no_speed() -> None:
    assert (
        estimated_plan.audit_lines(
            estimated_plan.audit_report(round_of(floor=0, first_groups=0, trusted_floor=0), LOAD)
        )
        == []
    )


def test_every_card_has_a_speed_in_float32() -> None:
    assert set(FLOAT32_TFLOPS) == set(SPEEDS)
