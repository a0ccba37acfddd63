"""vLLM's environment is not ours: what it sees of ours, and what is said of one that does not work."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from protocol.errors import ConfigInvalid
from swarm_node.engine import foreign
from swarm_node.engine.vllm import command as vllm_command
from tests.processes.programs import PATIENCE_S


def run(*words: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A module under an interpreter that sees no installed package, as far as we can say."""
    environment = {**os.environ, "PYTHONPATH": str(path or "")}
    command = [sys.executable, "-P", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_our_rooms_are_found_without_anything_that_is_installed_beside_them() -> None:
    done = run("-S", foreign.__file__, "swarm_node.engine.vllm.probe")
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'vllm'" in done.stderr


def test_packages_of_the_same_names_in_that_environment_are_not_ours(tmp_path: Path) -> None:
    for room in foreign.ROOMS:
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("raise SystemExit('somebody else')")
    assert run("-c", "import protocol", path=tmp_path).stderr == "somebody else\n"
    done = run(foreign.__file__, "swarm_node.engine.child", "--help", path=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("python", "message"),
    [("/nowhere/python", "does not run"), (sys.executable, "No module named 'vllm'"), ("/bin/false", "exit code 1")],
)
def test_an_interpreter_without_a_vllm_that_works_is_refused_with_what_it_takes(python: str, message: str) -> None:
    with pytest.raises(ConfigInvalid, match=message) as caught:
        vllm_command.probe(python)
    assert "pip install vllm" in caught.value.hint


STARTS_A_WORKER = """
import multiprocessing, os, signal, sys

def work():
    import swarm_node
    print(os.getpid(), swarm_node.__file__, flush=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    signal.pause()

def main(_arguments):
    multiprocessing.get_context("spawn").Process(target=work, daemon=True).start()
    sys.stdin.read()
    os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="no other kernel ends a process with its parent")
@pytest.mark.parametrize("how", ["kill -9", "the end of its input"])
def test_a_worker_process_finds_our_rooms_and_does_not_outlive_the_child(tmp_path: Path, how: str) -> None:
    (tmp_path / "outsider.py").write_text(STARTS_A_WORKER)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-P", foreign.__file__, "outsider"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        pid, place = child.stdout.readline().split()
        worker = psutil.Process(int(pid))
        assert Path(place).parents[1] == foreign.ROOT
        if how == "kill -9":
            child.send_signal(signal.SIGKILL)
        child.stdin.close()
        child.wait()
    _, alive = psutil.wait_procs([worker], timeout=PATIENCE_S)
    for each in alive:
        each.kill()
    assert not alive
