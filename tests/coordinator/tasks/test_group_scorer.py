"""The scorer with real processes on a real store: hangs and crashes cost their own groups at most."""

import asyncio
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from coordinator.base.children import script
from coordinator.reports import health
from coordinator.rules.prompt_refs import PromptRef
from coordinator.service import group_scorer
from coordinator.service.group_scorer import GroupScorer
from coordinator.service.waiting import WaitingRequests
from coordinator.store import tables
from coordinator.store.state import Database
from coordinator.tasks.sandbox import Sandbox
from coordinator.tasks.task_process import TaskProcessSpec
from coordinator.tasks.task_text import TaskText
from coordinator.transactions import scoring
from protocol.tasks import Problem
from protocol.tasks.arithmetic import Arithmetic
from tests.coordinator.policy_files import policy_files
from tests.coordinator.tasks.test_reward_judge import FakeJudge, says
from tests.coordinator.world import World

FUNCTION = """
import os, pathlib
from protocol.tasks import Reward

def fn(prompts, completions, **columns):
    what = prompts[0]
    if what == "crash":
        os._exit(7)
    if what == "once" and not pathlib.Path(__file__).with_suffix(".seen").exists():
        pathlib.Path(__file__).with_suffix(".seen").touch()
        os._exit(7)
    if what == "until mended" and not pathlib.Path(__file__).with_suffix(".mended").exists():
        raise ValueError("broken")
    if what == "lesson":
        return [Reward(0.25, "ok", weight=0.5, skip=((0, 1),)) for _ in completions]
    return [0.25] * len(completions)
"""

DEADLINE_S = 120


class Here:
    """A round as the scorer sees it."""

    def __init__(self, world: World) -> None:
        self.database: Database = world.database
        self.audits, self.terms = world.audits, world.terms
        self.policy = self
        self.waiting = WaitingRequests(world.database)

    async def text(self) -> TaskText:
        return TaskText(policy_files().__getitem__, Arithmetic(), 4)


def judged(
    world: World,
    folder: Path,
    prompts: list[str],
    until: Callable[[dict[int, str]], bool],
    problem: Callable[[PromptRef], Problem] | None = None,
    *,
    given_up_max: int = group_scorer.GIVEN_UP_MAX,
) -> dict[int, str]:
    """Let one node answer a group for each prompt, and the scorer work until the states are so."""
    world.judge = replace(world.judge, reward=None)
    key = world.join(1)
    for _ in prompts:
        world.earn(key)
    (folder / "mine.py").write_text(FUNCTION)
    sandbox = Sandbox(writable=(str(folder),))
    spec = TaskProcessSpec(((f"{folder}/mine.py:fn", 2.0),), timeout_s=60.0, processes=1, sandbox=sandbox)
    about = problem or (lambda source: Problem(prompts[source.number]))
    asyncio.run(scored_until(world, spec, about, lambda: until(states(world)), given_up_max=given_up_max))
    return states(world)


async def scored_until(
    world: World,
    spec: TaskProcessSpec,
    problem: Callable[[PromptRef], Problem],
    until: Callable[[], bool],
    *,
    given_up_max: int = group_scorer.GIVEN_UP_MAX,
) -> None:
    scoring_all = GroupScorer(Here(world), spec, problem, lambda: world.now_ms, pause_s=0.2, given_up_max=given_up_max)
    running = asyncio.create_task(scoring_all.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not until():
                done, _ = await asyncio.wait([running], timeout=0.05)
                assert not done
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def states(world: World) -> dict[int, str]:
    return {row["group_no"]: row["state"] for row in world.rows(tables.rollouts)}


def test_a_crash_costs_one_group_and_a_passing_one_none(world: World, tmp_path: Path) -> None:
    def all_are_judged(found: dict[int, str]) -> bool:
        return "unscored" not in found.values()

    found = judged(world, tmp_path, ["fine", "crash", "once", "fine"], all_are_judged)
    assert found == {0: "buffered", 1: "verifier_error", 2: "buffered", 3: "buffered"}
    assert "ended with code 7" in world.run(scoring.trouble)["reason"]


def test_what_a_reward_says_of_learning_comes_to_the_learner(world: World, tmp_path: Path) -> None:
    def all_are_judged(found: dict[int, str]) -> bool:
        return "unscored" not in found.values()

    judged(world, tmp_path, ["lesson", "fine"], all_are_judged)
    batch = world.batch(1)
    assert batch is not None
    assert [[(sample.weight, sample.skip) for sample in group.samples] for group in batch.groups] == [
        [(0.5, ((0, 1),))] * 2,
        [(1.0, ())] * 2,
    ]


def test_a_reward_that_is_broken_for_all_gives_few_groups_up_and_goes_on_when_mended(
    world: World, tmp_path: Path
) -> None:
    seen: list[str] = []

    def mended(found: dict[int, str]) -> bool:
        trouble = world.run(scoring.trouble)
        if trouble.get("down") and not seen:
            seen.append(trouble["reason"])
            (tmp_path / "mine.mended").touch()
        return "unscored" not in found.values()

    found = judged(world, tmp_path, ["until mended"] * 6, mended)
    assert sorted(found.values()) == ["buffered"] * 2 + ["verifier_error"] * 4
    assert seen == ["4 groups in a row could not be judged: ValueError (mine.py:13)."]
    assert world.run(scoring.trouble)["down"] is False


def test_a_judge_without_a_budget_pauses_the_round_and_loses_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """More groups wait than are given up for failures, and the judge is asked again and again."""
    world.judge = replace(world.judge, reward=None)
    key = world.join(1)
    for _ in range(6):
        world.earn(key)
    fake = FakeJudge(says("SCORE: 0.5"))
    spec = TaskProcessSpec(
        (("judge", 1.0),), timeout_s=60.0, processes=2, sandbox=Sandbox(network=True, writable=(str(tmp_path),))
    )
    paused = list[str]()
    requests_while_paused = list[int]()

    def logged() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == group_scorer.__name__]

    def all_are_judged_after_the_pause() -> bool:
        trouble = world.run(scoring.trouble)
        is_paused = trouble.get("down") and trouble["ms"] == world.now_ms
        # One process may be refused while the other's last call is on its way. After the budget was added, a refusal
        # from before may still arrive, while new calls are made: so neither the calls nor the log are read then.
        if is_paused and len(paused) < 3 and len(fake.requests) >= 3:
            requests_while_paused.append(len(fake.requests))
            paused.append(world.run(health.figures, None, 1)["alarm"])
            world.now_ms += 1  # the next look is another one
            if len(paused) == 3:
                assert "verifier_error" not in states(world).values()
                assert len(logged()) == 1, logged()
                add = ["task", "budget", str(tmp_path / "judge"), "--calls", "100"]
                subprocess.run([script("swarm-coordinator"), *add], check=True, capture_output=True)
        # The scorer logs after the store has the last rewards.
        return "unscored" not in states(world).values() and "groups are judged again" in logged()[-1]

    async def work() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", fake.answer)
        server = TestServer(app)
        await server.start_server()
        for name, value in {"URL": server.make_url("/v1"), "MODEL": "m", "FOLDER": tmp_path / "judge"}.items():
            monkeypatch.setenv(f"SWARM_JUDGE_{name}", str(value))
        monkeypatch.setenv("SWARM_JUDGE_CALLS_MAX", "3")
        try:
            await scored_until(world, spec, lambda source: Problem(str(source.number)), all_are_judged_after_the_pause)
        finally:
            await server.close()

    with caplog.at_level("INFO", logger=group_scorer.__name__):
        asyncio.run(work())
    assert set(states(world).values()) == {"buffered"}
    assert "The judge's budget is used up: 3 of 3 calls." in paused[0]
    assert "swarm-coordinator task budget" in paused[0]
    assert set(requests_while_paused) == {3}
    assert world.run(scoring.trouble)["down"] is False
    assert world.run(scoring.trouble)["groups"] == 0
    batch = world.batch(1)
    assert batch is not None
    assert {sample.reward for group in batch.groups for sample in group.samples} == {0.5}


def test_completions_that_crash_every_reward_do_not_hold_up_those_behind_them(world: World, tmp_path: Path) -> None:

    def the_last_is_judged(found: dict[int, str]) -> bool:
        return found[4] == "buffered"

    found = judged(world, tmp_path, ["crash"] * 4 + ["fine"], the_last_is_judged, given_up_max=1)
    assert set(found.values()) <= {"verifier_error", "unscored", "buffered"}
    assert list(found.values()).count("buffered") == 1


def test_a_failure_of_ours_is_tried_again_and_does_not_end_the_coordinator(world: World, tmp_path: Path) -> None:
    failures = [OSError("the disk with the problems is away")]

    def problem(_source: PromptRef) -> Problem:
        if failures:
            raise failures.pop()
        return Problem("fine")

    def all_are_judged(found: dict[int, str]) -> bool:
        return "unscored" not in found.values()

    found = judged(world, tmp_path, ["fine"] * 2, all_are_judged, problem)
    assert set(found.values()) == {"buffered"}
