"""A node with vLLM in real rounds: its rollouts and turns are accepted, and a replay finds the tokens of the seed."""

from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.processes.played_rounds import TASKS, episodes_of, played_groups, playing_policy, replay, settings_of
from tests.processes.programs import Swarm, until
from tests.processes.rounds import (
    Coordinator,
    Settings,
    assert_ledger_is_sound,
    join,
    node_id_of,
    operator_of,
)

pytestmark = pytest.mark.processes

SETTINGS: Settings = {"sampling": {"samples_per_group": 4, "max_new_tokens": 8}, "learner": {"groups_per_update": 64}}
STARTS_WITHIN_S = 1800.0


def test_rollouts_of_a_node_with_vllm_are_accepted_and_pass_an_audit(swarm: Swarm, python: str, policy: Path) -> None:
    coordinator = Coordinator(swarm, SETTINGS).start()
    operator_of(swarm, coordinator, policy).publish()
    node = join(swarm, "vllm", coordinator.join_string, "--vllm-python", python)
    until("groups to be accepted", lambda: coordinator.accepted_groups() >= 2, within_s=STARTS_WITHIN_S)
    node.interrupt()
    assert "it/s" not in node.log, "the agent's log has no progress bars"
    with coordinator.copy_of_store() as connection:
        (claim,) = connection.execute(sa.text("SELECT claim_id FROM rollouts LIMIT 1")).scalars()
    found = replay(coordinator, claim)
    assert (found["outcome"], found["summary"]["dictated_share"]) == ("pass", 1)
    assert_ledger_is_sound(coordinator)


@pytest.mark.parametrize("task", list(TASKS))
def test_vllm_plays_episodes_to_their_ends_and_a_replay_finds_its_tokens(
    swarm: Swarm, python: str, tmp_path: Path, task: str
) -> None:
    policy = playing_policy(tmp_path / "playing")
    coordinator = Coordinator(swarm, settings_of(TASKS[task], policy)).start()
    operator_of(swarm, coordinator, policy).publish()
    node = join(swarm, "vllm", coordinator.join_string, "--engine", "vllm", "--vllm-python", python)
    groups = played_groups(coordinator, node_id_of(node), 4, within_s=STARTS_WITHIN_S)
    node.interrupt()
    assert any(TASKS[task].answer in episode for episode in episodes_of(groups, policy))
    found = replay(coordinator, groups[0][-1].claim_id)
    assert (found["outcome"], found["summary"]["dictated_share"]) == ("pass", 1)
    assert_ledger_is_sound(coordinator)
