"""Held claims: what fails by numbers of another model is blamed on nobody, paid to nobody, and judged later."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.config import AuditSection
from coordinator.reports import explain, health
from coordinator.store import tables
from coordinator.store.facts import FINISHED, set_fact
from coordinator.transactions import audits, standings
from coordinator.transactions.audits import TRIES_MAX
from ledger import tables as ledger_tables
from protocol import limits
from protocol.wire.signing import NodeKey
from protocol.work.auditing import Cases, Explanation, Explanations, Found, Judged, Why
from tests.coordinator.world import World

BF16, FP32 = "torch/bf16/cuda", "torch/fp32/cpu"


@pytest.fixture
def world(tmp_path: Path, store_url: str) -> Iterator[World]:
    """A round in which an owner's first ten groups are all audited."""
    made = World(tmp_path, staleness=100, rules=AuditSection(), postgres_url=store_url)
    made.publish(1, 0)
    yield made
    made.database.close()


def earn(world: World, key: NodeKey) -> str:
    """A claim that nothing is known of yet."""
    before = {row["claim_id"] for row in world.rows(tables.rollouts)}
    world.earn(key)
    (claim,) = {row["claim_id"] for row in world.rows(tables.rollouts)} - before
    return str(claim)


def bring(world: World, claim: str, finding: Found) -> int:
    verdict = Judged(
        claim_id=claim,
        finding=finding,
        validator="replay/4",
        report=json.dumps({"outcome": finding}).encode(),
        waits_for=BF16 if finding == "held" else "",
    )
    counted: int = world.run(audits.record_verdicts, (verdict,), terms=world.audits, now_ms=world.now_ms)
    return counted


def take(world: World, *classes: str) -> Cases:
    taken: Cases = world.run(audits.assign_cases, "one", 64, classes, terms=world.audits, now_ms=world.now_ms)
    return taken


def entries(world: World) -> int:
    return len(world.rows(ledger_tables.entries_table))


def money(world: World, claim: str) -> str:
    return {row["claim_id"]: str(row["state"]) for row in world.rows(ledger_tables.claims_table)}[claim]


def told(world: World, key: NodeKey, about: str) -> Explanation:
    explained: Explanations = world.run(
        explain.explain, key.node_id, Why(about=about), tolerance="", tolerances=b"", now_ms=world.now_ms
    )
    return next(iter(explained.explanations))


def test_a_held_claim_is_no_fault_and_no_entry_and_its_group_leaves_the_buffer(world: World) -> None:
    key = world.join(1)
    claim = earn(world, key)
    before = entries(world)
    (taken,) = take(world).cases
    assert bring(world, taken.claim_id, "held") == 1
    assert entries(world) == before, "nothing about it stands in the log"
    standing = world.run(standings.find_standing, key.node_id)
    assert (standing.hard, standing.soft, standing.groups) == (0, 0, 0)
    assert [row["state"] for row in world.rows(tables.rollouts)] == ["retracted"]
    assert world.group_states() == {0: "open"}, "its prompt is offered again"
    assert money(world, claim) == "pending"
    assert (take(world, FP32).cases, world.run(standings.backlog)) == ((), 0), "no auditor waits for it"


@pytest.mark.parametrize(("finding", "state"), [("pass", "posted"), ("soft", "posted"), ("hard", "voided")])
def test_a_held_claim_is_judged_once_its_class_is_calibrated(world: World, finding: Found, state: str) -> None:
    claim = earn(world, world.join(1))
    bring(world, claim, "held")
    assert [case.claim_id for case in take(world, FP32, BF16).cases] == [claim]
    assert bring(world, claim, finding) == 1
    world.run(set_fact, FINISHED, True)
    world.release_leftovers()
    assert money(world, claim) == state
    assert world.audit() == []


def test_a_claim_may_be_held_again(world: World) -> None:
    """An auditor that began before the calibration brings the same finding once more."""
    claim = earn(world, world.join(1))
    bring(world, claim, "held")
    assert bring(world, claim, "held") == 0, "it does not wait"
    take(world, BF16)
    assert bring(world, claim, "held") == 1
    assert [row["held_as"] for row in world.rows(tables.audits)] == [BF16]


@pytest.mark.parametrize("gives_up", [False, True], ids=["its version is gone", "it kills auditors"])
def test_a_forgery_is_not_paid_by_waiting_until_nobody_can_judge_it(world: World, gives_up: bool) -> None:
    """A pardon pays as if the claim had never been drawn: it must not be had by naming a class that nobody has."""
    claim = earn(world, world.join(1))
    honest = earn(world, world.join(2))
    bring(world, honest, "pass")
    bring(world, claim, "held")
    take(world, BF16)
    if gives_up:
        for _ in range(TRIES_MAX + 1):
            take(world, BF16)
    else:
        bring(world, claim, "pardon")
    assert [row["held_as"] for row in world.rows(tables.audits)] == [tables.LOST, ""]
    assert take(world, BF16).cases == ()
    world.run(set_fact, FINISHED, True)
    world.release_leftovers()
    assert [money(world, one) for one in (claim, honest)] == ["pending", "posted"]
    assert take(world).done, "the auditor does not wait for it"


def test_the_end_of_the_round_pays_no_held_claim(world: World) -> None:
    claim = earn(world, world.join(1))
    bring(world, claim, "held")
    world.run(set_fact, FINISHED, True)
    world.release_leftovers()
    assert money(world, claim) == "pending"
    assert take(world).done
    assert [case.claim_id for case in take(world, BF16).cases] == [claim], "it can be judged after the end, too"


def test_an_owner_with_held_claims_gets_no_more_work_until_they_are_judged(world: World) -> None:
    """The quality of held claims is unknown: a forger of an uncalibrated class could poison batches for ever."""
    stranger, probe = world.join(1), world.join(2)
    world.terms = replace(world.terms, probes=frozenset({probe.node_id}))
    for key in (stranger, probe):
        for claim in [earn(world, key) for _ in range(limits.HELD_CLAIMS_MAX)]:
            bring(world, claim, "held")
    reply = world.offer(stranger, numerics=BF16)
    assert (reply.leases, reply.reason) == ((), "numerics")
    assert world.offer(probe, numerics=BF16).leases, "or nobody could calibrate"
    take(world, BF16)
    assert world.offer(stranger, numerics=BF16).leases


def test_both_sides_are_told_the_class_and_what_to_do(world: World) -> None:
    key = world.join(1)
    claim = earn(world, key)
    bring(world, claim, "held")
    said = told(world, key, claim)
    assert (said.state, said.finding, said.code) == ("pending", "held", "")
    assert BF16 in said.said
    assert "no fault" in said.said
    alarm = world.run(health.figures, None, 1)["alarm"]
    assert f"swarm-coordinator calibrate FILE.toml --node NODE --class {BF16}" in alarm
    assert world.run(standings.audited)["held"] == {BF16: 1}
    take(world, BF16)
    bring(world, claim, "pass")
    assert world.run(health.figures, None, 1)["alarm"] == ""
    assert told(world, key, claim).finding == "pass"


def test_auditors_are_told_which_cases_are_of_the_operators_own_nodes(world: World) -> None:
    stranger, probe = world.join(1), world.join(2)
    world.audits = replace(world.audits, probes=frozenset({probe.node_id}))
    claims = {earn(world, key): key is probe for key in (stranger, probe)}
    assert {case.claim_id: case.is_probe for case in take(world).cases} == claims


def test_versions_are_kept_for_held_claims(world: World) -> None:
    claim = earn(world, world.join(1))
    assert world.run(standings.oldest_waiting) == 1
    bring(world, claim, "held")
    assert world.run(standings.oldest_waiting) == 1
    take(world, BF16)
    bring(world, claim, "pardon")
    assert world.run(standings.oldest_waiting) is None, "what is lost keeps nothing"


def test_later_claims_of_an_owner_do_not_wait_for_a_lost_one(world: World) -> None:
    key = world.join(1)
    lost = earn(world, key)
    bring(world, lost, "held")
    take(world, BF16)
    bring(world, lost, "pardon")
    good = [earn(world, key) for _ in range(2)]
    for claim in good:
        bring(world, claim, "pass")
    world.run(set_fact, FINISHED, True)
    world.release_leftovers()
    assert [money(world, claim) for claim in (lost, *good)] == ["pending", "posted", "posted"]
