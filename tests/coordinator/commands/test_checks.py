"""The holder of a port is recognised: a round by the lock that its coordinator holds open."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.commands.checks import find_holder, require_code
from coordinator.config import load
from protocol.errors import ConfigInvalid

HOLDS = """
import socket, sys
lock = open(sys.argv[1] + "/coordinator.lock", "a")
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""
CHILD_HOLDS = """
import subprocess, sys
lock = open(sys.argv[1] + "/coordinator.lock", "a")
child = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)"
child += "; sys.stdin.read()"
subprocess.run([sys.executable, "-c", child], check=True)
"""


@pytest.mark.parametrize("program", [HOLDS, CHILD_HOLDS], ids=["coordinator", "its seeder"])
def test_a_round_is_recognised_by_its_lock(tmp_path: Path, program: str) -> None:
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdin
        port = int(process.stdout.readline())
        holder = find_holder("127.0.0.1", port, "coordinator.lock")
        process.stdin.close()
    assert holder is not None
    assert holder.folder == tmp_path
    assert holder.pid
    assert str(holder).startswith(f"the round in {tmp_path} (pid {holder.pid}: ")
    assert find_holder("127.0.0.1", port, "coordinator.lock") is None, "it is free again"


def test_an_address_that_cannot_be_resolved_and_any_port_are_held_by_nobody() -> None:
    assert find_holder("no.such.host.invalid", 1, "x") is None
    assert find_holder("127.0.0.1", 0, "x") is None


def test_a_wildcard_address_conflicts_with_one_of_its_addresses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        assert find_holder("0.0.0.0", busy.getsockname()[1], "x") is not None


def test_a_launch_needs_the_operators_code_and_not_the_data_that_the_round_has_copied(tmp_path: Path) -> None:
    task = tmp_path / "my_task.py"
    settings = [f"task.name={task}", f"reward.functions={tmp_path}/rewards.py:f", "data.train=gone.jsonl"]
    with pytest.raises(ConfigInvalid, match=r"task\.name: .*my_task\.py does not exist"):
        require_code(load(None, settings))
    task.touch()
    with pytest.raises(ConfigInvalid, match=r"reward\.functions: .*rewards\.py does not exist"):
        require_code(load(None, settings))
    (tmp_path / "rewards.py").touch()
    require_code(load(None, settings))
