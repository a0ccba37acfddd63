"""Figures of what the last updates taught, the time left, and alarms for work that teaches nothing."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
import sqlalchemy as sa

from coordinator.config import Config, parse
from coordinator.environments.adapting import ToolCalls, ToolResult
from coordinator.environments.with_tools import tool_environment
from coordinator.reports import learned, overview, summary
from coordinator.store.facts import FINISHED, set_fact
from coordinator.store.tables import batches, versions
from coordinator.transactions import reward_columns
from protocol.tasks import Problem, Reward
from tests.coordinator.world import World

CONFIG = parse({"round": {"max_updates": 108}})
TEACHES = {
    "reward/mean": 0.5, "reward/signal": 0.6, "entropy": 0.41, "length/mean": 312.4, "length/truncated": 0.03,
    "is/masked_frac": 0.01, "kl/k3": 0.0012, "learner/tokens_per_s": 3200.0, "learner/train_s": 40.0,
}  # fmt: skip


def updates(world: World, count: int, metrics: dict[str, float], config: Config = CONFIG) -> dict[str, Any]:
    """Make updates that report these metrics, and return the status."""
    key = world.join(1)
    for number in range(1, count + 1):
        for _ in range(2):
            world.earn(key, version=number)
        world.train(number)
        world.publish(number + 1, number)
    changed = sa.update(batches).values(metrics=metrics, idle_s=20.0, busy_s=100.0)
    world.run(lambda connection: connection.execute(changed))
    status = world.run(summary.explained, config=config, alive_since_ms=0)
    found: dict[str, Any] = status | summary.public_settings(config, "a" * 64)
    return found


def codes(status: dict[str, Any]) -> set[str]:
    return {alarm["code"] for alarm in status["alarms"]}


def test_a_user_reads_on_one_screen_what_is_learned_how_fast_and_how_long_it_takes(world: World) -> None:
    status = updates(world, learned.UPDATES, TEACHES)
    assert status["left_s"] == 100 * 120.0
    (part,) = [part for part in overview.parts(status) if part.title == "learning"]
    assert part.lines == (
        "lately: reward 0.500, rewards differ in 60% of the groups, entropy 0.410 nats",
        "answers of 312 tokens, 3.0% cut; 1.0% of the tokens dropped, KL from the samplers 0.0012",
        "an update takes 2 min, 40 s of it training at 3,200 tokens/s; about 3 h left",
    )
    assert codes(status).isdisjoint({"nothing_learned", "answers_cut"})


def test_a_round_without_an_update_and_a_learner_that_reports_nothing_have_no_such_lines(world: World) -> None:
    status = updates(world, 0, {})
    assert status["left_s"] is None
    assert "learning" not in {part.title for part in overview.parts(status)}
    assert status["learned"] == {}


@pytest.mark.parametrize(("share", "alarms"), [(0.05, False), (0.04, True), (0.0, True)])
def test_groups_whose_samples_all_earn_the_same_raise_the_alarm(world: World, share: float, alarms: bool) -> None:
    """Otherwise a round whose reward is always 0 is paid for to its end, and every figure looks healthy."""
    status = updates(world, learned.UPDATES, TEACHES | {"reward/signal": share, "reward/mean": 0.0})
    assert ("nothing_learned" in codes(status)) == alarms
    if alarms:
        (text,) = [alarm["text"] for alarm in status["alarms"] if alarm["code"] == "nothing_learned"]
        assert f"{1 - share:.0%} of the groups" in text
        assert "mean reward 0.000" in text
        assert "selection.filter_after" in text


@pytest.mark.parametrize(
    ("settings", "alarms"),
    [
        ({"learner": {"algorithm": "dr_grpo"}}, True),
        ({"learner": {"algorithm": "reinforce_pp"}}, False),
        ({"learner": {"algorithm": "reinforce_pp"}, "objective": {"scale_rewards": "group"}}, True),
    ],
    ids=str,
)
def test_equal_rewards_in_a_group_raise_no_alarm_where_samples_of_all_groups_are_compared(
    world: World, settings: dict[str, Any], alarms: bool
) -> None:
    """A sure policy has groups without a difference, and still learns which problems it solves."""
    status = updates(world, learned.UPDATES, TEACHES | {"reward/signal": 0.0}, parse(settings))
    assert ("nothing_learned" in codes(status)) == alarms


def test_a_round_that_was_finished_early_has_no_time_left(world: World) -> None:
    updates(world, learned.UPDATES, TEACHES)
    world.run(set_fact, FINISHED, True)
    status = world.run(summary.explained, config=CONFIG, alive_since_ms=0)
    assert (status["update_interval_s"], status["left_s"]) == (120.0, None)


def test_the_status_counts_the_updates_that_had_no_gradient(world: World) -> None:
    status = updates(world, 3, TEACHES | {"learner/empty": 1.0})
    assert status["updates_empty_lately"] == 3
    assert any("3 of the last 32 updates had a step without a gradient" in line for line in overview._learning(status))


def test_a_night_without_nodes_does_not_change_the_pace(world: World) -> None:
    updates(world, learned.UPDATES, TEACHES)
    night = sa.update(batches).where(batches.c.batch == 3).values(idle_s=8 * 3600.0)
    world.run(lambda connection: connection.execute(night))
    assert world.run(learned.update_interval_s) == 120.0


def test_a_long_wait_once_a_version_is_part_of_the_pace(world: World) -> None:
    updates(world, learned.UPDATES, TEACHES)
    every_fourth = sa.update(batches).where(batches.c.batch % 4 == 0).values(idle_s=3900.0)
    world.run(lambda connection: connection.execute(every_fourth))
    assert world.run(learned.update_interval_s) == (3 * 120.0 + 4000.0) / 4


def test_a_long_wait_once_in_many_updates_is_part_of_the_pace_where_versions_are_that_rare(world: World) -> None:
    updates(world, 48, TEACHES)
    world.run(lambda connection: connection.execute(sa.delete(versions).where(versions.c.policy_update % 12 != 0)))
    every_twelfth = sa.update(batches).where(batches.c.batch % 12 == 0).values(idle_s=3900.0)
    world.run(lambda connection: connection.execute(every_twelfth))
    assert world.run(learned.update_interval_s) == pytest.approx((11 * 120.0 + 4000.0) / 12)
    night = sa.update(batches).where(batches.c.batch == 30).values(idle_s=8 * 3600.0)
    world.run(lambda connection: connection.execute(night))
    assert world.run(learned.update_interval_s) == pytest.approx((43 * 120.0 + 4 * 4000.0) / 47)


@pytest.mark.parametrize(
    ("calls", "errors", "alarms"),
    [(2.0, 1.0, False), (2.0, 1.1, True), (0.0, 0.5, True), (0.04, 0.04, False), (2.0, 0.0, False)],
)
def test_tools_most_of_whose_calls_fail_raise_the_alarm(
    world: World, calls: float, errors: float, alarms: bool
) -> None:
    """A tool that lost its key or its server answers every call with an error, and the policy learns to do without."""
    found = {learned.TOOL_CALLS: calls, learned.TOOL_ERRORS: errors}
    status = updates(world, learned.UPDATES, TEACHES | found)
    assert ("tools_fail" in codes(status)) == alarms


def test_the_components_of_an_environment_with_tools_are_those_that_the_alarm_reads() -> None:
    def look(at: str) -> str:
        """Look at a place."""
        return at

    episode = tool_environment([look], lambda _problem, _completion: 1.0)(Problem("", "", {}))
    earned = asyncio.run(episode.reward())
    assert isinstance(earned, Mapping)
    figures = reward_columns.figures([reward_columns.stored([Reward(1.0, "ok", earned)])])
    names = {learned.TOOL_CALLS, learned.TOOL_ERRORS}
    assert names <= {f"reward/{name}" for name in figures}
    others = reward_columns.figures([reward_columns.stored([Reward(1.0, "ok", ToolCalls(unused).components)])])
    assert names <= {f"reward/{name}" for name in others}


async def unused(_name: str, _arguments: Mapping[str, Any]) -> ToolResult:
    """Return nothing: an episode without calls."""
    raise AssertionError


@pytest.mark.parametrize(("share", "alarms"), [(0.5, False), (0.51, True)])
def test_answers_that_are_cut_raise_the_alarm(world: World, share: float, alarms: bool) -> None:
    status = updates(world, learned.UPDATES, TEACHES | {"length/truncated": share})
    assert ("answers_cut" in codes(status)) == alarms


def test_a_few_updates_raise_no_alarm(world: World) -> None:
    status = updates(world, learned.UPDATES - 1, TEACHES | {"reward/signal": 0.0, "length/truncated": 1.0})
    assert codes(status).isdisjoint({"nothing_learned", "answers_cut"})
