"""A checkpoint survives a kill at any write, and goes on where it was.

- A child forks once for every point at which writing can be cut: each call that opens, renames or syncs, and bytes all
  over the file, at which the kernel ends the process by its limit for files. The forks die for real.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from coordinator.learner import checkpoint
from coordinator.learner.algorithm import PRESETS
from coordinator.learner.policy import Policy
from coordinator.learner.settings import TrainSettings
from protocol.errors import ConfigInvalid
from tests.coordinator.learner.groups import UNEQUAL

SETTINGS = TrainSettings(learning_rate=1e-2, warmup_updates=1, algorithm=PRESETS["echo2"])  # which drops no sample

KILLED = """
import os, resource, signal, sys
from pathlib import Path
import torch
from coordinator.learner import checkpoint

path, size = Path(sys.argv[1]), 100_000
state = {"update": 2, "weights": {"w": torch.full((size // 4,), 2.0)}}

def at_event(number):
    seen = 0
    def hook(name, _):
        nonlocal seen
        if name in ("open", "os.rename"):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

def at_byte(number):
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))

def at_sync(number):
    sync, seen = os.fsync, 0
    def dying(descriptor):
        nonlocal seen
        seen += 1
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)
        sync(descriptor)
    os.fsync = dying

points = [(at_event, number) for number in (1, 2, 3)]
points += [(at_byte, number) for number in (0, 1, size // 2, size, size + 100)]
points += [(at_sync, number) for number in (1, 2)]
for arm, number in points:
    checkpoint.write(path, {"update": 1, "weights": {"w": torch.full((size // 4,), 1.0)}})
    child = os.fork()
    if child == 0:
        arm(number)
        checkpoint.write(path, state)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    found = checkpoint.read(path)
    whole = float(found["weights"]["w"].min()) == float(found["weights"]["w"].max()) == found["update"]
    signal_number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    print(arm.__name__, number, signal_number, found["update"], whole, flush=True)
"""


@pytest.mark.processes
def test_kill_9_at_any_write_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "checkpoint")]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    assert len(lines) == 10
    for line in lines:
        _, _, ended_by, update, whole = line.split()
        assert ended_by != "0", f"{line}: this point was never reached"
        assert update in ("1", "2")
        assert whole == "True"
    assert {line.split()[3] for line in lines} == {"1", "2"}, "kills before and after the rename"


def test_resumed_updates_come_to_the_weights_of_an_uninterrupted_run(policy_folder: Path, tmp_path: Path) -> None:
    batches = [UNEQUAL, UNEQUAL[:2], UNEQUAL[1:], UNEQUAL]
    straight = Policy(policy_folder, SETTINGS)
    for batch in batches:
        straight.train_step(batch)

    resumed = Policy(policy_folder, SETTINGS)
    while resumed.update < len(batches):
        resumed.train_step(batches[resumed.update])
        resumed.save(tmp_path / "checkpoint")
        resumed = Policy(policy_folder, SETTINGS)  # as another process would
        resumed.restore(tmp_path / "checkpoint")
    for one, other in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("damage", ["empty", "cut", "text"])
def test_what_is_no_checkpoint_is_told_by_name(policy_folder: Path, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "checkpoint"
    checkpoint.write(path, {"update": 1})
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": whole[: len(whole) // 2], "text": b"no checkpoint\n" * 9}[damage])
    with pytest.raises(ConfigInvalid, match="no checkpoint"):
        Policy(policy_folder, SETTINGS).restore(path)


def test_reading_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (exec, ("raise SystemExit",))

    torch.save({"update": Trap()}, path)
    with pytest.raises(ConfigInvalid, match="no checkpoint"):
        checkpoint.read(path)
