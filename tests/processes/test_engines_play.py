"""Each engine of our own environment plays rounds of several turns: a game, and a task with tools."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.played_rounds import (
    TASKS,
    PlayedTask,
    episodes_of,
    played_groups,
    playing_policy,
    replay,
    settings_of,
)
from tests.processes.programs import PATIENCE_S, Swarm
from tests.processes.rounds import Coordinator, assert_ledger_is_sound, join, node_id_of, operator_of

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return playing_policy(tmp_path_factory.mktemp("policy") / "playing")


@pytest.fixture(scope="module", params=["tools", pytest.param("sokoban", marks=pytest.mark.slow)])
def task(request: pytest.FixtureRequest) -> PlayedTask:
    return TASKS[request.param]


@pytest.fixture(scope="module")
def played(
    tmp_path_factory: pytest.TempPathFactory, task: PlayedTask, policy: Path
) -> Iterator[tuple[Swarm, Coordinator]]:
    """A round of the task, for one node after the other."""
    swarm = Swarm(tmp_path_factory.mktemp("swarm"))
    coordinator = Coordinator(swarm, settings_of(task, policy)).start()
    operator_of(swarm, coordinator, policy).publish()
    yield swarm, coordinator
    swarm.close()


@pytest.mark.parametrize("engine", [pytest.param("torch", marks=pytest.mark.slow), "llama"])
def test_an_engine_plays_episodes_to_their_ends_and_a_replay_finds_its_tokens(
    played: tuple[Swarm, Coordinator], task: PlayedTask, policy: Path, engine: str
) -> None:
    swarm, coordinator = played
    node = join(swarm, engine, coordinator.join_string, "--engine", engine)
    groups = played_groups(coordinator, node_id_of(node), 4, within_s=4 * PATIENCE_S)
    node.interrupt()
    assert f"engine {engine}:" in node.log
    assert any(task.answer in episode for episode in episodes_of(groups, policy))
    found = replay(coordinator, groups[0][-1].claim_id)
    assert (found["outcome"], found["summary"]["dictated_share"]) == ("pass", 1)
    assert_ledger_is_sound(coordinator)
