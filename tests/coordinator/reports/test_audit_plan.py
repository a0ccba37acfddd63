"""The share of the nodes' work that an auditor can replay, by stated speeds."""

from dataclasses import replace
from typing import Any

import pytest

from coordinator.config import Config, parse
from coordinator.reports import audit_plan
from coordinator.reports.audit_plan import AuditLoad
from coordinator.reports.estimated_plan import Range
from coordinator.rules.hardware import FLOAT32_TFLOPS, SPEEDS, find_shape

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
    found = audit_plan.report(round_of(neighbours=0), LOAD)["tokens_per_s"]
    assert found["high"] == pytest.approx(258, rel=0.1)
    assert "70 GFLOP/s" in found["source"]


def test_a_second_replay_halves_the_speed_and_a_second_thread_doubles_it() -> None:
    once = audit_plan.report(round_of(neighbours=0), LOAD)["tokens_per_s"]["high"]
    assert audit_plan.report(round_of(), LOAD)["tokens_per_s"]["high"] == pytest.approx(once / 2)
    assert audit_plan.report(round_of(), replace(LOAD, threads=2))["tokens_per_s"]["high"] == pytest.approx(once)


def test_an_auditor_that_does_not_keep_up_is_told_with_the_rate_that_it_holds_and_the_next_step() -> None:
    slow = replace(LOAD, delivered=Range(10_000, 20_000, 40_000))
    found = audit_plan.report(round_of(), slow)
    said = "\n".join(audit_plan.lines(found))
    assert not found["keeps_up"]
    assert f"{found['rate_held']['middle']:.1%}" in said
    assert "IT DOES NOT KEEP UP" in said
    assert "audit.device" in said
    on_card = audit_plan.report(round_of(device="cuda:1"), slow)
    assert on_card["keeps_up"]
    assert "it keeps up" in "\n".join(audit_plan.lines(on_card))


def test_a_round_without_audits_needs_no_speed() -> None:
    assert audit_plan.lines(audit_plan.report(round_of(floor=0, first_groups=0, trusted_floor=0), LOAD)) == []


def test_every_card_has_a_speed_in_float32() -> None:
    assert set(FLOAT32_TFLOPS) == set(SPEEDS)
