"""Output of commands to a full disk: the failure is reported in one line, like every failure."""

import subprocess
from pathlib import Path

import pytest

from tests.processes.programs import script

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here is always full"),
]


@pytest.mark.parametrize(
    ("program", "words"),
    [("swarm-node", ("limits", "--home", "home")), ("swarm-coordinator", ("config", "explain"))],
    ids=["node", "coordinator"],
)
def test_a_full_output_is_named(tmp_path: Path, program: str, words: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([script(program), *words], stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{program}: No space left on the disk for the output of this command.")
    assert done.stderr.endswith("[disk_full]\n")
    assert done.stderr.count("\n") == 1
