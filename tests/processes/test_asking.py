"""The operator's commands find a coordinator that was launched at other addresses than its file names."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.processes.programs import Swarm, free_address, script
from tests.processes.rounds import Coordinator, operator_of

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def coordinator(swarm: Swarm, policy: Path) -> Coordinator:
    """Launched to listen everywhere, which its file does not say."""
    made = Coordinator(swarm, {})
    port = made.address.rpartition(":")[2]
    made.config_file.write_text(made.config_file.read_text().replace(made.address, free_address()))
    options = ["--no-learner", "--no-auditor", "--set", f"round.listen=0.0.0.0:{port}"]
    program = swarm.start("coordinator", script("swarm-coordinator"), "launch", str(made.config_file), *options)
    program.said(r"swarm-node join (\S+)$")
    made._program = program
    operator_of(swarm, made, policy).publish()
    return made


def say(coordinator: Coordinator, *words: str) -> str:
    group, *rest = words
    line = [script("swarm-coordinator"), *([group] if not rest else [group, rest[0]]), str(coordinator.config_file)]
    return subprocess.run([*line, *rest[1:]], capture_output=True, text=True, check=True).stdout


def test_status_nodes_and_orders_about_versions_reach_it(coordinator: Coordinator) -> None:
    assert json.loads(say(coordinator, "nodes", "list", "--json")) == []
    assert "STOPPED" not in say(coordinator, "status")
    assert "STOPPED" not in say(coordinator, "policy", "list")
    assert "has these weights already" in say(coordinator, "policy", "rollback", "1", "--reason", "to see")


def test_a_kill_is_seen_with_its_moment_and_a_launch_goes_on(coordinator: Coordinator) -> None:
    coordinator.program.kill()
    assert say(coordinator, "status").startswith("state      STOPPED since ")
    assert "STOPPED since" in say(coordinator, "nodes", "list")
