"""The scorer with real processes on a real store: hangs and crashes cost their own groups at most."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from coordinator.service import reward_scorer
from coordinator.service.reward_scorer import RewardScorer
from coordinator.service.turn_watch import TurnWatch
from coordinator.store import tables
from coordinator.store.state import Database
from coordinator.tasks.reward_process import RewardSpec
from coordinator.tasks.sandbox import Sandbox
from coordinator.tasks.task_text import TaskText
from coordinator.transactions import scoring
from coordinator.transactions.prompts import PromptRef
from protocol.tasks import Problem
from protocol.tasks.arithmetic import Arithmetic
from tests.coordinator.policy_files import policy_files
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
        self.unscored, self.batch_ready, self.turn_watch = asyncio.Event(), asyncio.Event(), TurnWatch()

    async def text(self) -> TaskText:
        return TaskText(policy_files().__getitem__, Arithmetic(), 4)


def judged(
    world: World,
    folder: Path,
    prompts: list[str],
    until: Callable[[dict[int, str]], bool],
    problem: Callable[[PromptRef], Problem] | None = None,
    *,
    given_up_max: int = reward_scorer.GIVEN_UP_MAX,
) -> dict[int, str]:
    """Let one node answer a group for each prompt, and the scorer work until the states are so."""
    world.judge = replace(world.judge, reward=None)
    key = world.join(1)
    for _ in prompts:
        world.earn(key)
    (folder / "mine.py").write_text(FUNCTION)
    here = Here(world)
    sandbox = Sandbox(writable=(str(folder),))
    spec = RewardSpec(((f"{folder}/mine.py:fn", 2.0),), timeout_s=60.0, processes=1, sandbox=sandbox)

    async def work() -> None:
        about = problem or (lambda source: Problem(prompts[source.number]))
        scoring_all = RewardScorer(here, spec, about, lambda: world.now_ms, pause_s=0.2, given_up_max=given_up_max)
        running = asyncio.create_task(scoring_all.run())
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not until(states(world)):
                    done, _ = await asyncio.wait([running], timeout=0.05)
                    assert not done
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(work())
    return states(world)


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
    assert "4 groups in a row" in seen[0]
    assert "ValueError: broken" in seen[0]
    assert world.run(scoring.trouble)["down"] is False


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
