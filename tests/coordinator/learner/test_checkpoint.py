"""A checkpoint survives a kill at any write, and goes on where it was.

- A child forks once for every point at which writing can be cut: each call that opens, renames or syncs, and bytes all
  over the file, at which the kernel ends the process by its limit for files. The forks die for real.
"""

import io
import pickle
import shutil
import subprocess
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from coordinator.learner import checkpoint
from coordinator.learner.algorithm import PRESETS, Trajectories
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.ranks import Ranks
from coordinator.learner.settings import TrainSettings
from protocol.errors import ConfigInvalid
from tests.coordinator.learner.groups import UNEQUAL

SETTINGS = TrainSettings(learning_rate=1e-2, warmup_updates=1, algorithm=PRESETS["echo2"])  # which drops no sample

KILLED = """
import os, resource, signal, sys
from pathlib import Path
import torch
from coordinator.learner import checkpoint
from coordinator.learner.ranks import Ranks

top, size, ranks = Path(sys.argv[1]), 100_000, Ranks()

def write(folder, update):
    w = torch.full((size // 4,), float(update))
    checkpoint.write(folder, update, {"w": w}, {"update": update, "steps": 0}, ranks)()

def at_event(number):
    seen = 0
    def hook(name, _):
        nonlocal seen
        if name in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"):
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

points = [(at_event, number) for number in range(1, 16)]
points += [(at_byte, number) for number in (0, 1, size // 2, size, size + 100)]
points += [(at_sync, number) for number in range(1, 6)]
for place, (arm, number) in enumerate(points):
    folder = top / str(place)
    write(folder, 1)
    child = os.fork()
    if child == 0:
        arm(number)
        write(folder, 2)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    path, w = checkpoint.newest(folder), torch.zeros(size // 4)
    checkpoint.read_tensors(path, {"w": w}, ranks)
    update = checkpoint.read_beside(path)["update"]
    whole = float(w.min()) == float(w.max()) == update
    signal_number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    print(arm.__name__, number, signal_number, update, whole, flush=True)
"""


@pytest.mark.processes
def test_kill_9_at_any_write_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "checkpoint")]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    assert len(lines) == 25
    for line in lines:
        _, _, ended_by, update, whole = line.split()
        assert ended_by != "0", f"{line}: this point was never reached"
        assert update in ("1", "2")
        assert whole == "True"
    assert {line.split()[3] for line in lines} == {"1", "2"}, "kills before and after the rename"


def last(folder: Path) -> Path:
    found = checkpoint.newest(folder)
    assert found
    return found


@pytest.mark.parametrize("trajectories", ["all", "weighted"])
def test_resumed_updates_come_to_the_weights_of_an_uninterrupted_run(
    policy_folder: Path, tmp_path: Path, trajectories: Trajectories
) -> None:
    """The draws of an update follow from its number: they are repeated."""
    settings = replace(SETTINGS, algorithm=replace(PRESETS["echo2"], trajectories=trajectories), seed=3)
    batches = [UNEQUAL, UNEQUAL[:2], UNEQUAL[1:], UNEQUAL]
    straight = TrainedPolicy(policy_folder, settings)
    for batch in batches:
        straight.train_step(batch)

    resumed = TrainedPolicy(policy_folder, settings)
    while resumed.update < len(batches):
        resumed.train_step(batches[resumed.update])
        resumed.save(tmp_path)
        resumed = TrainedPolicy(policy_folder, settings)  # as another process would
        resumed.restore(last(tmp_path))
    for one, other in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("damage", ["empty", "cut", "text", "missing"])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "beside"])
def test_what_is_no_checkpoint_is_told_by_name(policy_folder: Path, tmp_path: Path, name: str, damage: str) -> None:
    TrainedPolicy(policy_folder, SETTINGS).save(tmp_path)
    file = last(tmp_path) / name
    whole = file.read_bytes()
    file.write_bytes({"cut": whole[: len(whole) // 2], "text": b"no checkpoint\n" * 9}.get(damage, b""))
    if damage == "missing":
        file.unlink()
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        TrainedPolicy(policy_folder, SETTINGS).restore(last(tmp_path))


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_reading_a_checkpoint_runs_no_code(policy_folder: Path, tmp_path: Path, name: str) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (exec, ("raise SystemExit",))

    TrainedPolicy(policy_folder, SETTINGS).save(tmp_path)
    file = last(tmp_path) / name
    if name == ".metadata":
        file.write_bytes(pickle.dumps(Trap()))
    else:
        trap = io.BytesIO()
        torch.save(Trap(), trap)
        file.write_bytes(trap.getvalue() * (1 + file.stat().st_size // len(trap.getvalue())))
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        TrainedPolicy(policy_folder, SETTINGS).restore(last(tmp_path))


def test_bytes_in_the_place_of_a_tensor_run_no_code(policy_folder: Path, tmp_path: Path) -> None:
    """Torch unpickles bytes without restrictions if the metadata says that an entry is no tensor."""
    TrainedPolicy(policy_folder, SETTINGS).save(tmp_path)
    trap, ran = io.BytesIO(), tmp_path / "ran"
    torch.save(Opener(ran), trap)
    (last(tmp_path) / "__0_0.distcp").write_bytes(trap.getvalue() * (1 + 2**20 // len(trap.getvalue())))
    file = last(tmp_path) / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.state_dict_metadata = dict.fromkeys(metadata.state_dict_metadata, BytesStorageMetadata())
    stored = _StorageInfo("__0_0.distcp", 0, len(trap.getvalue()))
    metadata.storage_data = {MetadataIndex(name): stored for name in metadata.state_dict_metadata}
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        TrainedPolicy(policy_folder, SETTINGS).restore(last(tmp_path))
    assert not ran.exists()


@pytest.mark.parametrize("name", ["../other", "/dev/zero", "a\x1b[2J"])
def test_a_checkpoint_names_only_files_of_its_own_folder(policy_folder: Path, tmp_path: Path, name: str) -> None:
    TrainedPolicy(policy_folder, SETTINGS).save(tmp_path)
    file = last(tmp_path) / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    shutil.copyfile(last(tmp_path) / "__0_0.distcp", tmp_path / "other")
    for place, stored in metadata.storage_data.items():
        metadata.storage_data[place] = replace(stored, relative_path=name)
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ConfigInvalid, match="names a file outside of it"):
        TrainedPolicy(policy_folder, SETTINGS).restore(last(tmp_path))


class Opener:
    """An object that opens a file for writing when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return (open, (str(self._path), "w"))


def test_the_newest_whole_checkpoint_counts(policy_folder: Path, tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "checkpoints") is None
    policy = TrainedPolicy(policy_folder, SETTINGS)
    policy.save(tmp_path, said=b"first")
    policy.train_step(UNEQUAL)
    (tmp_path / "000000001.new").mkdir()  # what a kill left
    (tmp_path / "000000001.new" / "__7_0.distcp").write_bytes(b"half")
    policy.save(tmp_path, said=b"second")
    policy.save(tmp_path, said=b"third")
    assert [path.name for path in tmp_path.iterdir()] == ["000000001"]
    assert TrainedPolicy(policy_folder, SETTINGS).restore(last(tmp_path))["said"] == b"second", (
        "the same state has one name"
    )


@pytest.mark.parametrize(
    ("failure", "is_local"),
    [
        (MemoryError(), True),
        (OSError(5, "Input/output error"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("PytorchStreamReader failed reading zip archive"), False),
        (ValueError("no tensor"), False),
    ],
)
def test_a_failure_of_one_ranks_machine_says_nothing_of_the_files(
    failure: Exception, is_local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An auditor would blame the learner for files that cannot be read."""

    def fail(*_: object, **__: object) -> None:
        raise CheckpointException("load", {1: (failure, traceback.extract_stack())})

    # torch wraps a failure of another rank so; here one process stands for both, and has no files.
    monkeypatch.setattr(checkpoint, "load", fail)
    monkeypatch.setattr(checkpoint, "require_whole", lambda _: None)
    with pytest.raises(RuntimeError if is_local else ConfigInvalid, match="read"):
        checkpoint.read_tensors(tmp_path, {}, Ranks())


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_a_path_that_another_python_wrote_is_read(module: str) -> None:
    pickled = f"c{module}\nPosixPath\n(Va/b\ntR.".encode()
    assert checkpoint._MetadataUnpickler(io.BytesIO(pickled)).load() == Path("a/b")
