"""A node with vLLM in a real round: its rollouts are accepted, and a replay says that the seed dictates them."""

import json
import subprocess
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.processes.programs import Swarm, script, until
from tests.processes.rounds import Coordinator, Settings, assert_ledger_is_sound, join, operator_of

pytestmark = pytest.mark.processes

SETTINGS: Settings = {"sampling": {"samples_per_group": 4, "max_new_tokens": 8}, "learner": {"groups_per_update": 64}}
STARTS_WITHIN_S = 1800.0


def test_rollouts_of_a_node_with_vllm_are_accepted_and_pass_an_audit(swarm: Swarm, python: str, policy: Path) -> None:
    coordinator = Coordinator(swarm, SETTINGS).start()
    operator_of(swarm, coordinator, policy).publish()
    node = join(swarm, "vllm", coordinator.join_string, "--vllm-python", python)
    until("groups to be accepted", lambda: coordinator.accepted_groups() >= 2, within_s=STARTS_WITHIN_S)
    node.interrupt()
    with coordinator.copy_of_store() as connection:
        (claim,) = connection.execute(sa.text("SELECT claim_id FROM rollouts LIMIT 1")).scalars()
    command = [script("swarm-coordinator"), "audit", "replay", str(coordinator.config_file), claim, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert (done.returncode, found["outcome"], found["summary"]["dictated_share"]) == (0, "pass", 1)
    assert_ledger_is_sound(coordinator)
