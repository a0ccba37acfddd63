"""Systems without POSIX locks, such as Windows itself: the agent says so, and has changed nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from protocol.errors import ConfigInvalid
from swarm_node.base import disk

WITHOUT = """
import sys
sys.modules["fcntl"] = None
from swarm_node.cli import main
main()
"""


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-P", "-c", WITHOUT, *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", ["join", "seed", "keys"])
def test_nothing_is_begun_without_locks(command: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    words = {
        "join": ["join", f"http://127.0.0.1:1#{'a' * 64}", "--home", str(home)],
        "seed": ["seed", "--blobs", str(home), "--key", str(home / "key")],
        "keys": ["keys", "show", "--home", str(home)],
    }
    done = run(*words[command])
    assert done.returncode == 2
    assert done.stderr.startswith("swarm-node: The node does not run on Windows directly")
    assert "WSL 2" in done.stderr
    assert "Traceback" not in done.stderr
    assert not home.exists()


def test_help_is_given_everywhere() -> None:
    done = run("join", "--help")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_lock_that_somebody_holds_is_refused_by_its_own_name(tmp_path: Path) -> None:
    taken = ConfigInvalid("Somebody is here.")
    with disk.hold_lock(tmp_path / "lock", taken), pytest.raises(ConfigInvalid) as found:  # noqa: SIM117  # the second fails
        with disk.hold_lock(tmp_path / "lock", taken):
            pytest.fail("two hold it")
    assert found.value is taken
    with disk.hold_lock(tmp_path / "lock", taken):
        pass
