"""The report of a waiting learner: its most likely cause, and the next step."""

from pathlib import Path
from typing import Any

import pytest

from coordinator.config import AuditSection, Config, parse
from coordinator.reports import learner_waiting, moderation, overview, summary
from coordinator.store.facts import FINISHED, set_fact
from coordinator.transactions import batches, standings
from protocol.text.money import CREDITS
from tests.coordinator.world import World

CONFIG = parse({"market": {"max_price_micros_per_mtok": 1_000_000}, "audit": {"backlog_max": 2}})
ROUND = summary.public_settings(CONFIG, "a" * 64)


def told(world: World, config: Config = CONFIG, *, silent: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = world.run(summary.explained, config=config, alive_since_ms=world.now_ms + silent)
    return found


def look(world: World, **change: Any) -> learner_waiting.LearnerWaiting:
    return learner_waiting.explain_waiting(told(world) | change, CONFIG, backlog=world.run(standings.backlog))


@pytest.fixture
def at_work(world: World) -> World:
    """A round with a node, one update trained."""
    key = world.join(1)
    for _ in range(world.terms.groups_per_update):
        world.earn(key)
    world.train(1)
    return world


def test_a_round_without_a_version_says_where_its_learner_writes(tmp_path: Path) -> None:
    found = look(World(tmp_path))
    assert found.state == "starts"
    assert str(Path("logs") / "learner.log") in found.why


def test_a_learner_that_hardly_waits_is_told_to_work(at_work: World) -> None:
    for update, last in ((1, "last update"), (3, "last 3 updates"), (90, "last 32 updates")):
        assert look(at_work, learner_idle_share_lately=0.02, update=update) == learner_waiting.LearnerWaiting(
            "works", f"The learner waits 2% of its time, over its {last}."
        )


def test_before_the_first_update_no_share_is_told(world: World) -> None:
    world.join(1)
    assert look(world) == learner_waiting.LearnerWaiting(
        "works", "No update is done yet: the first batch is being sampled, or trained on."
    )


def test_without_a_node_it_waits_and_with_a_batch_at_hand_it_will(at_work: World) -> None:
    alone = told(at_work, silent=True)
    assert alone["learner"]["state"] == "waits"
    assert "Give the join string" in alone["learner"]["why"]
    assert learner_waiting.explain_waiting(alone | {"batch": 2}, CONFIG, backlog=0).state == "will wait"


def test_paused_nodes_are_counted_and_if_all_are_no_node_works(at_work: World) -> None:

    def pause(number: int) -> dict[str, Any]:
        node = at_work.join(number).node_id
        at_work.run(moderation.order, "pause", node, "tests", given_by="me", terms=at_work.audits, now_ms=5)
        return told(at_work)

    one = pause(2)
    assert "No node works" not in one["learner"]["why"]
    assert "2 of 2 nodes alive, version 1 on 0 of them, 1 paused by the operator" in overview.text(one | ROUND)
    both = pause(1)
    assert (both["learner"]["state"], "No node works" in both["learner"]["why"]) == ("waits", True)
    assert "nodes resume" in both["learner"]["why"]
    assert both["nodes_paused"] == told(at_work, silent=True)["nodes_paused"] == 2, "also while they are away"


def test_claims_that_wait_for_an_auditor_stop_the_work(tmp_path: Path) -> None:
    world = World(tmp_path, rules=AuditSection(first_groups=64))
    world.publish(1, 0)
    key = world.join(1)
    world.earn(key)
    assert look(world).state == "works"
    world.earn(key)
    found = look(world)
    assert (found.state, "audit.backlog_max = 2" in found.why) == ("waits", True)


def test_a_budget_below_the_dearest_group_is_named(tmp_path: Path) -> None:
    dearest = CONFIG.sampling.samples_per_group * CONFIG.sampling.max_new_tokens
    for budget_micros, state in ((dearest, "works"), (dearest - 1, "waits")):
        folder = tmp_path / state
        folder.mkdir()
        world = World(folder, budget_micros=budget_micros)
        world.publish(1, 0)
        world.join(1)
        found = look(world)
        assert found.state == state
        assert (f"a group may cost {CREDITS.exact(dearest)}" in found.why) == (state == "waits")


def test_a_reward_that_fails_comes_before_everything_else(at_work: World) -> None:
    found = look(at_work, verifier={"down": True, "reason": "It hangs."}, nodes_alive=0)
    assert (found.state, "No rewards: It hangs." in found.why) == ("waits", True)


def test_a_hold_for_a_retraction_is_the_cause_and_not_too_few_groups(at_work: World) -> None:
    at_work.run(batches.hold, 60.0, at_work.now_ms)
    for passed_s, is_held in ((0, True), (61, False)):
        now_ms = at_work.now_ms + 1000 * passed_s
        figures = at_work.run(summary.explained, config=CONFIG, alive_since_ms=at_work.now_ms, now_ms=now_ms)
        assert ("retraction" in figures["learner"]["why"]) is is_held


def test_a_learner_that_waits_is_told_the_cause_once_that_is_measured(at_work: World) -> None:
    assert "have been measured" in look(at_work, learner_idle_share_lately=0.5, load=None).why
    known = look(at_work, learner_idle_share_lately=0.5, load={"staleness": 1}, alarm="S = 1 is too small")
    assert known == learner_waiting.LearnerWaiting("waits", "S = 1 is too small")


def test_the_end_is_no_waiting(at_work: World) -> None:
    at_work.run(set_fact, FINISHED, True)
    assert told(at_work, silent=True)["learner"]["state"] == "finished"
