"""Prompts chosen by how their groups came out, on the real store: nothing lost, and the same after any crash."""

from collections.abc import Set
from pathlib import Path
from typing import Any

import pytest

from coordinator.config import parse
from coordinator.reports import summary
from coordinator.reports.metrics import exposition
from coordinator.reports.overview import _prompts
from coordinator.rules.selection import OFF, SelectionRules
from coordinator.store import tables
from coordinator.transactions import curriculum, scoring
from protocol.errors import ConfigInvalid
from protocol.policy import chunks
from protocol.tasks import Reward
from protocol.wire.signing import NodeKey
from protocol.work.lease import Lease
from protocol.work.rollout import pack_logprobs, pack_tokens, unpack_tokens
from tests.coordinator.world import END, World, answer, honest_sample

FILTER = SelectionRules(filter_after=1, probe_every=3, window=4)
PROBLEMS = 4


def problem_of(lease: Lease) -> int:
    return int(unpack_tokens(lease.prompt)[0]) - 10


def answered(world: World, key: NodeKey, *, mixed: Set[int] = frozenset(), wrong: Set[int] = frozenset()) -> int:
    """Take a lease and answer it: all right, all wrong, or half and half; the problem it was about."""
    lease = world.lease(key)
    problem, right = problem_of(lease), honest_sample(lease)
    bad = right.model_copy(update={"tokens": pack_tokens([9, END]), "logprobs": pack_logprobs([-1.0, -1.0])})
    samples = (bad, bad) if problem in wrong else (right, bad) if problem in mixed else (right, right)
    assert world.submit(key, answer(key, lease, samples=samples)).outcome == "accepted"
    return problem


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path, selection=FILTER, problems=PROBLEMS, staleness=20, size=4)
    made.publish(1, 0)
    return made


def test_what_is_always_right_or_wrong_comes_up_less_often_and_is_not_lost(world: World) -> None:
    key = world.join(1)
    served = [answered(world, key, mixed={1, 2}, wrong={3}) for _ in range(4 + 2 + 2 + 4)]
    assert served == [0, 1, 2, 3, 1, 2, 1, 2, 0, 1, 2, 3], "left out twice, then probed"
    shown = world.run(curriculum.curriculum_report, FILTER)
    assert shown == {
        "prompts_seen": 4,
        "prompts_always_right": 1,
        "prompts_always_wrong": 1,
        "always_right": 2,
        "always_wrong": 2,
        "passed_over": 0,
        "probed": 2,
    }


def test_off_is_the_order_of_always_and_keeps_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, problems=PROBLEMS, staleness=20)
    world.publish(1, 0)
    key = world.join(1)
    assert [answered(world, key) for _ in range(6)] == [0, 1, 2, 3, 0, 1]
    assert world.rows(tables.outcomes) == []
    assert world.run(curriculum.curriculum_report, OFF) == {}


def test_a_restart_in_the_middle_of_a_window_changes_nothing(tmp_path: Path) -> None:
    served = []
    for restarts in (False, True):
        folder = tmp_path / str(restarts)
        folder.mkdir()
        world = World(folder, selection=FILTER, problems=PROBLEMS, staleness=20, size=4)
        world.publish(1, 0)
        key = world.join(1)
        found = []
        for _ in range(20):
            found.append(answered(world, key, mixed={1}, wrong={3}))
            if restarts:
                world.reopen()
        served.append(found)
    assert served[0] == served[1]


def test_what_was_chosen_is_used_up_when_the_rules_are_switched_off(world: World) -> None:
    key = world.join(1)
    first = [answered(world, key, mixed={0, 1, 2, 3}) for _ in range(2)]
    world.terms = type(world.terms)(**{**vars(world.terms), "selection": OFF})
    assert first + [answered(world, key) for _ in range(5)] == [0, 1, 2, 3, 0, 1, 2]


def test_rules_may_be_switched_on_later(tmp_path: Path) -> None:
    world = World(tmp_path, problems=PROBLEMS, staleness=20)
    world.publish(1, 0)
    key = world.join(1)
    first = [answered(world, key) for _ in range(2)]
    world.terms = type(world.terms)(**{**vars(world.terms), "selection": FILTER})
    assert first + [answered(world, key) for _ in range(4)] == [0, 1, 2, 3, 0, 1]


def test_the_seldom_seen_and_the_varied_are_taken_first(tmp_path: Path) -> None:
    rules = SelectionRules(window=4, share=0.5, exploration=0.1, probe_every=1000)
    world = World(tmp_path, selection=rules, problems=PROBLEMS, staleness=20, size=4)
    world.publish(1, 0)
    key = world.join(1)
    served = [answered(world, key, mixed={2}) for _ in range(12)]
    assert served[:4] == [0, 1, 2, 3], "two of the first four, then the other two, which were never seen"
    assert served.count(2) > 3 * max(served.count(problem) for problem in (0, 1, 3)) / 2


def test_the_lookahead_takes_what_was_chosen(tmp_path: Path) -> None:
    world = World(tmp_path, selection=FILTER, problems=PROBLEMS, staleness=20, size=4, lookahead=4)
    world.publish(1, 0)
    key = world.join(1)
    served = [answered(world, key, mixed={1, 2}, wrong={3}) for _ in range(24)]
    assert set(served[:4]) == {0, 1, 2, 3}
    assert served.count(0) < served.count(1)
    assert served.count(0) > 1
    made = [row["prompt"] for row in world.rows(tables.groups)]
    assert len(set(made)) == len(made), "no place of the train split is used twice"


def test_a_reward_that_comes_later_counts_when_it_comes(world: World) -> None:
    key = world.join(1)
    world.judge = type(world.judge)(**{**vars(world.judge), "reward": None})
    lease = world.lease(key)
    world.submit(key, answer(key, lease))
    assert [row["groups"] for row in world.rows(tables.outcomes)] == []
    (waiting,) = world.run(scoring.waiting, 1)
    rewards = [Reward(0.0, "ok"), Reward(1.0, "ok")]
    for _ in range(2):  # whoever comes second changes nothing
        world.run(scoring.scored, waiting.claim_id, rewards, rules=FILTER, now_ms=1)
    (row,) = world.rows(tables.outcomes)
    assert row == {
        "prompt": chunks.digest(lease.prompt), "groups": 1, "mean": 0.5, "variance": 0.25, "alike": 0, "left_out": 0
    }  # fmt: skip


def test_an_answer_that_comes_twice_counts_once(world: World) -> None:
    key = world.join(1)
    lease = world.lease(key)
    outcomes = [world.submit(key, answer(key, lease)).outcome for _ in range(2)]
    assert outcomes == ["accepted", "already_accepted"]
    assert [row["groups"] for row in world.rows(tables.outcomes) if row["groups"]] == [1]


def test_status_screen_and_metrics_say_what_was_left_out(world: World) -> None:
    key = world.join(1)
    for _ in range(8):
        answered(world, key, mixed={1, 2}, wrong={3})
    config = parse({"selection": {"filter_after": 1}})
    status: dict[str, Any] = world.run(summary.status, config=config, alive_since_ms=0)
    assert status["selection"]["always_wrong"] == 2
    assert "left out 2 times as always right, 2 as always wrong" in " ".join(_prompts(status["selection"]))
    page = exposition(status).decode()
    assert 'echo_swarm_prompts{outcome="always_right"} 1.0' in page
    assert 'echo_swarm_prompts_left_out_total{reason="always_wrong"} 2.0' in page


@pytest.mark.parametrize("setting", [{"share": 0}, {"share": float("nan")}, {"probe_every": 1}, {"window": 0}])
def test_settings_that_would_lose_prompts_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigInvalid):
        parse({"selection": setting})


def test_two_processes_choose_as_one(postgres_url: str, tmp_path: Path) -> None:
    """The other processes hand out work beside a leader: they share the chosen prompts and their results."""
    served = []
    for processes in (1, 2):
        world = World(tmp_path, selection=FILTER, problems=PROBLEMS, staleness=20, size=4, postgres_url=postgres_url)
        world.publish(1, 0)
        key = world.join(1)
        databases = [world.database, *(type(world.database)(postgres_url) for _ in range(processes - 1))]
        found = []
        for number in range(16):
            world.database = databases[number % processes]
            found.append(answered(world, key, mixed={1}, wrong={3}))
        served.append(found)
        for database in databases:
            database.close()
    assert served[0] == served[1]
