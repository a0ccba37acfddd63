"""Updates and removals beside a running agent: no code of its own is ever taken from under it."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.installers.machine import Machine
from tests.installers.small_agent import small_wheel

JOIN = "http://127.0.0.1:8700#ab"

MANAGER = """
# The user's systemd, as far as it is asked for here: it starts what the unit says, and ends it by the unit's signal.
unit=$HOME/.config/systemd/user/swarm-node.service log=$HOME/agent.log
shift
echo "$*" >>"$HOME/orders"
works() { tail -n 1 "$log" 2>/dev/null | grep -q 'at work'; }
start() {
  $(sed -n 's/^ExecStart=//p' "$unit") >>"$log" 2>&1 &
  echo $! >"$HOME/agent.pid"
  until works; do sleep 0.1; done  # until it has said so
}
stop() {
  pid=$(cat "$HOME/agent.pid")
  kill "-$(sed -n 's/^KillSignal=SIG//p' "$unit")" "$pid"
  while grep -q . "/proc/$pid/cmdline" 2>/dev/null; do sleep 0.1; done  # until it has ended
}
case $1 in
  is-active) works ;;
  enable) case $* in *--now*) works || start ;; esac ;;
  restart) ! works || stop; start ;;
  disable) ! works || stop ;;
esac
"""


def log(machine: Machine) -> list[str]:
    return (machine.home / "agent.log").read_text().splitlines()


def orders(machine: Machine) -> list[str]:
    return (machine.home / "orders").read_text().splitlines()


@pytest.fixture
def served(machine: Machine) -> Iterator[Machine]:
    """Version 1.0 at work as the service of a user, and 1.1 to be had."""
    machine.put("id", "echo 1000")
    machine.put("systemctl", MANAGER)
    first = machine.run("--service", JOIN)
    assert first.returncode == 0, first.stdout + first.stderr
    assert log(machine) == ["1.0 at work"]
    (machine.home / "orders").unlink()
    small_wheel(machine.wheels, "1.1")
    yield machine
    if log(machine)[-1].endswith("at work"):
        os.kill(int((machine.home / "agent.pid").read_text()), signal.SIGKILL)


@contextmanager
def by_hand(machine: Machine, *words: str) -> Iterator[subprocess.Popen[str]]:
    """An agent in somebody's terminal, which Ctrl-C ends."""
    command = [str(machine.program), *words]
    with subprocess.Popen(command, env=machine.environment({}), stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        assert "at work" in agent.stdout.readline()
        try:
            yield agent
        finally:
            agent.send_signal(signal.SIGINT)
            agent.communicate()


@pytest.mark.parametrize("options", [[], ["--service", JOIN]], ids=["an update", "the service once more"])
def test_the_service_leaves_cleanly_and_runs_the_new_version(served: Machine, options: list[str]) -> None:
    assert ("restarts with the new version" in served.run("--dry-run", *options).stdout) == (not options)
    run = served.run(*options)
    assert run.returncode == 0, run.stderr
    assert log(served) == ["1.0 at work", "1.0 left by SIGINT", "1.1 at work"], "restarted, and once"
    assert "The service is running the new version" in run.stdout
    assert "still run" not in run.stdout


def test_a_service_that_its_owner_has_stopped_stays_stopped(served: Machine) -> None:
    subprocess.run([served.tools / "systemctl", "--user", "disable"], env=served.environment({}), check=True)
    (served.home / "orders").unlink()
    assert served.run().returncode == 0
    assert set(orders(served)) == {"is-active --quiet swarm-node.service"}
    assert log(served) == ["1.0 at work", "1.0 left by SIGINT"]


def test_the_service_of_another_installation_is_left_alone(served: Machine) -> None:
    elsewhere = Machine(served.home / "second", served.wheels, served.tools)
    run = elsewhere.run(HOME=str(served.home))
    assert run.returncode == 0, run.stderr
    assert not (served.home / "orders").exists()
    assert log(served) == ["1.0 at work"]


def test_a_service_that_does_not_start_again_is_told_with_the_next_step(served: Machine) -> None:
    served.put("systemctl", 'case "$*" in *is-active*) ;; *) echo "Job failed." >&2; exit 1 ;; esac')
    run = served.run()
    assert run.returncode == 1
    assert served.version() == "echo-swarm 1.1"
    assert "is installed, but its service did not restart" in run.stderr
    assert "systemctl --user status swarm-node.service" in run.stderr


def test_an_agent_started_by_hand_is_named_with_the_next_step_and_keeps_its_folder(machine: Machine) -> None:
    assert machine.run().returncode == 0
    first = (machine.prefix / "current").resolve()
    with by_hand(machine, "join", JOIN, "--home", "here") as agent:
        for version in ("1.1", "1.2"):
            small_wheel(machine.wheels, version)
            run = machine.run()
            assert run.returncode == 0, run.stderr
            still = f"Process {agent.pid} still runs the previous version: swarm-node join {JOIN} --home here"
            assert still in run.stdout
            assert "swarm-node finish --home here" in run.stdout
        assert first.is_dir()
        assert machine.versions() == 3, "the one in use, the one before, and the new one"
    assert machine.run().returncode == 0
    assert not first.exists()
    assert machine.versions() == 2


def test_a_mirror_is_ended_by_a_signal_since_it_finishes_nothing(machine: Machine) -> None:
    assert machine.run().returncode == 0
    with by_hand(machine, "mirror", JOIN) as agent:
        assert f"kill -INT {agent.pid}" in machine.run().stdout


def test_what_runs_of_another_prefix_is_nobodys_business(machine: Machine) -> None:
    elsewhere = Machine(machine.home / "second", machine.wheels, machine.tools)
    assert elsewhere.run().returncode == 0
    assert machine.run().returncode == 0
    with by_hand(elsewhere, "join", JOIN):
        assert "still runs" not in machine.run().stdout


def test_a_prefix_is_the_same_by_whatever_path(machine: Machine, tmp_path: Path) -> None:
    assert machine.run().returncode == 0
    (tmp_path / "link").symlink_to(machine.home)
    other = Machine(tmp_path / "link", machine.wheels, machine.tools)
    with by_hand(other, "join", JOIN) as agent:
        assert f"Process {agent.pid} still runs" in other.run().stdout


def test_what_runs_is_not_uninstalled(machine: Machine) -> None:
    assert machine.run().returncode == 0
    with by_hand(machine, "join", JOIN) as agent:
        run = machine.run("--uninstall")
        assert run.returncode == 1
        assert f"Process {agent.pid} is still running: swarm-node join {JOIN}" in run.stderr
        assert "swarm-node finish" in run.stderr
        assert machine.version() == "echo-swarm 1.0"
    assert machine.run("--uninstall").returncode == 0
    assert not machine.prefix.exists()


def test_the_service_is_ended_before_its_code_is_removed(served: Machine) -> None:
    run = served.run("--uninstall")
    assert run.returncode == 0, run.stderr
    assert log(served) == ["1.0 at work", "1.0 left by SIGINT"]
    assert not served.prefix.exists()


def test_an_agent_keeps_to_the_vllm_of_its_own_version(machine: Machine) -> None:
    assert machine.run().returncode == 0
    version = (machine.prefix / "current").resolve()
    vllm = version / "vllm" / "bin" / "python"
    vllm.parent.mkdir(parents=True)
    vllm.touch(mode=0o755)
    (version / "bin" / "swarm-node").write_text('#!/bin/sh\necho "$SWARM_VLLM_PYTHON"\n')
    ran = subprocess.run([machine.program], env=machine.environment({}), capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(vllm)
