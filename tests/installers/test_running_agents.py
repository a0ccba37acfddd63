"""Updates and removals beside a running agent: no code of its own is ever taken from under it."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.installers.machine import Machine, make_machine, quick_uv
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


class Snapshot:
    """A machine in a state that each test finds again, at the same path: an environment cannot be moved."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._saved = folder / "machine", folder / "saved"
        self._folder.mkdir()
        self.machine = make_machine(self._folder)
        self.machine.put("uv", quick_uv())

    def save(self) -> None:
        shutil.copytree(self._folder, self._saved, symlinks=True)

    def restored(self) -> Machine:
        shutil.rmtree(self._folder)
        shutil.copytree(self._saved, self._folder, symlinks=True)
        return self.machine


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    made = Snapshot(tmp_path_factory.mktemp("installation"))
    assert made.machine.run().returncode == 0
    made.save()
    return made


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    made = Snapshot(tmp_path_factory.mktemp("service"))
    made.machine.put("id", "echo 1000")
    made.machine.put("systemctl", MANAGER)
    first = made.machine.run("--service", JOIN)
    assert first.returncode == 0, first.stdout + first.stderr
    assert log(made.machine) == ["1.0 at work"]
    manage(made.machine, "disable")
    for name in ("agent.log", "orders"):
        (made.machine.home / name).unlink()
    made.save()
    return made


def manage(machine: Machine, *words: str) -> None:
    """Order something of the service's manager."""
    subprocess.run([machine.tools / "systemctl", "--user", *words], env=machine.environment({}), check=True)


@pytest.fixture
def installed(installation: Snapshot) -> Machine:
    """Version 1.0, which nothing runs."""
    return installation.restored()


@pytest.fixture
def served(service: Snapshot) -> Iterator[Machine]:
    """Version 1.0 at work as the service of a user, and 1.1 to be had."""
    machine = service.restored()
    manage(machine, "enable", "--now")
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
    manage(served, "disable")
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


def test_an_agent_started_by_hand_is_named_with_the_next_step_and_keeps_its_folder(installed: Machine) -> None:
    first = (installed.prefix / "current").resolve()
    with by_hand(installed, "join", JOIN, "--home", "here") as agent:
        for version in ("1.1", "1.2"):
            small_wheel(installed.wheels, version)
            run = installed.run()
            assert run.returncode == 0, run.stderr
            still = f"Process {agent.pid} still runs the previous version: swarm-node join {JOIN} --home here"
            assert still in run.stdout
            assert "swarm-node finish --home here" in run.stdout
        assert first.is_dir()
        assert installed.versions() == 3, "the one in use, the one before, and the new one"
    assert installed.run().returncode == 0
    assert not first.exists()
    assert installed.versions() == 2


def test_a_mirror_is_ended_by_a_signal_since_it_finishes_nothing(installed: Machine) -> None:
    with by_hand(installed, "mirror", JOIN) as agent:
        assert f"kill -INT {agent.pid}" in installed.run().stdout


def test_what_runs_of_another_prefix_is_nobodys_business(installed: Machine) -> None:
    elsewhere = Machine(installed.home / "second", installed.wheels, installed.tools)
    assert elsewhere.run().returncode == 0
    with by_hand(elsewhere, "join", JOIN):
        assert "still runs" not in installed.run().stdout


def test_a_prefix_is_the_same_by_whatever_path(installed: Machine, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(installed.home)
    other = Machine(tmp_path / "link", installed.wheels, installed.tools)
    with by_hand(other, "join", JOIN) as agent:
        assert f"Process {agent.pid} still runs" in other.run().stdout


def test_what_runs_is_not_uninstalled(installed: Machine) -> None:
    with by_hand(installed, "join", JOIN) as agent:
        run = installed.run("--uninstall")
        assert run.returncode == 1
        assert f"Process {agent.pid} is still running: swarm-node join {JOIN}" in run.stderr
        assert "swarm-node finish" in run.stderr
        assert installed.version() == "echo-swarm 1.0"
    assert installed.run("--uninstall").returncode == 0
    assert not installed.prefix.exists()


def test_the_service_is_ended_before_its_code_is_removed(served: Machine) -> None:
    run = served.run("--uninstall")
    assert run.returncode == 0, run.stderr
    assert log(served) == ["1.0 at work", "1.0 left by SIGINT"]
    assert not served.prefix.exists()


def test_an_agent_keeps_to_the_vllm_of_its_own_version(installed: Machine) -> None:
    version = (installed.prefix / "current").resolve()
    vllm = version / "vllm" / "bin" / "python"
    vllm.parent.mkdir(parents=True)
    vllm.touch(mode=0o755)
    (version / "bin" / "swarm-node").write_text('#!/bin/sh\necho "$SWARM_VLLM_PYTHON"\n')
    ran = subprocess.run([installed.program], env=installed.environment({}), capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(vllm)
