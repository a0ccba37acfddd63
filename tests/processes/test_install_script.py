"""`/install.sh` of a launched coordinator, piped into a shell on a machine with little on it."""

import hashlib
import subprocess
from pathlib import Path

import pytest

from tests.installers.conftest import machine as machine
from tests.installers.conftest import plain_machine as plain_machine
from tests.installers.machine import Machine
from tests.installers.small_agent import small_wheel
from tests.processes.programs import PATIENCE_S, Swarm
from tests.processes.rounds import NOBODY_LEARNS, Coordinator

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_wheel(tmp_path_factory.mktemp("wheel"), "4.0")


@pytest.fixture(scope="module")
def coordinator(swarm: Swarm, wheel: Path) -> Coordinator:
    return Coordinator(swarm, {**NOBODY_LEARNS, "round": {"agent_wheel": str(wheel)}}).start()


def piped(machine: Machine, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    place = ["--prefix", str(machine.prefix), "--bin", str(machine.home / "bin")]
    return subprocess.run(
        ["/bin/sh", "-s", "--", *place, "--engine", "none", *options],
        input=script,
        env=machine.environment({}),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_one_line_installs_the_agent_of_the_round_and_names_the_next_command(
    coordinator: Coordinator, machine: Machine
) -> None:
    served = coordinator.http.get("/install.sh")
    assert served.status_code == 200
    assert served.headers["Content-Type"] == "text/x-shellscript; charset=utf-8"
    run = piped(machine, served.text)
    assert run.returncode == 0, run.stderr
    assert machine.version() == "echo-swarm 4.0"
    assert f"echo_swarm-4.0-py3-none-any.whl from {coordinator.url}" in run.stdout
    assert f"swarm-node mirror '{coordinator.join_string}'" in run.stdout, "it has no engine, so it cannot sample"


def test_half_a_script_does_nothing(coordinator: Coordinator, machine: Machine) -> None:
    script = coordinator.http.get("/install.sh").text
    run = piped(machine, script[: script.rindex('main "$@"')])
    assert (run.returncode, run.stdout) == (0, "")
    assert list(machine.home.iterdir()) == []


def test_a_wheel_that_was_swapped_after_the_script_is_refused(
    coordinator: Coordinator, machine: Machine, wheel: Path
) -> None:
    script, honest = coordinator.http.get("/install.sh").text, wheel.read_bytes()
    wheel.write_bytes(honest + b"swapped")
    try:
        run = piped(machine, script, "--dry-run")
    finally:
        wheel.write_bytes(honest)
    assert run.returncode == 1
    assert hashlib.sha256(honest).hexdigest() in run.stderr


@pytest.mark.parametrize("name", ["echo_swarm-9.0-py3-none-any.whl", "..%2fround.toml", "round.toml"])
def test_nothing_but_the_wheel_is_served(coordinator: Coordinator, name: str) -> None:
    assert coordinator.http.get(f"/install/{name}").status_code == 404
