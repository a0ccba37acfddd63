"""A backup takes the learner's newest checkpoint as a whole, whatever the learner does meanwhile, or is not made."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from coordinator.learner import checkpoint
from coordinator.learner.ranks import Ranks
from coordinator.service.backup import making, restoring
from coordinator.service.backup.archive import BackupInvalid
from coordinator.service.backup.following import Follower
from protocol.errors import ConfigInvalid
from tests.coordinator.served import serve

LEARNER = """
import sys
from pathlib import Path
import torch
from coordinator.learner import checkpoint
from coordinator.learner.ranks import Ranks

for update in range(2, 40):
    w = torch.full((1000,), float(update))
    checkpoint.write(Path(sys.argv[1]), update, {"w": w}, {"update": update, "steps": 0}, Ranks())()
"""


def quiet(_what: str, _done: int, _total: int) -> None:
    """Ignore progress."""


def write(folder: Path, update: int) -> None:
    w = torch.full((1000,), float(update))
    checkpoint.write(folder, update, {"w": w}, {"update": update, "steps": 0}, Ranks())()


def update_of(path: Path) -> int:
    """Return the update of a checkpoint, which all of its bytes repeat."""
    w = torch.zeros(1000)
    checkpoint.read_tensors(path, {"w": w}, Ranks())
    update = int(checkpoint.read_beside(path)["update"])
    assert float(w.min()) == float(w.max()) == update
    return update


def save(place: Path, target: str, spoil: Callable[[Path], object] = lambda _checkpoint: None) -> Path:
    """A backup of a round whose learner has made two checkpoints and begun a third."""

    async def make() -> None:
        async with serve(place) as served:
            await served.publish()
            await served.round.publish_checkpoint()
            learner = served.round.folder / "learner"
            for update in (1, 2):
                write(learner / "checkpoints", update)
            (learner / "checkpoints" / "000000003.new").mkdir()
            for name in ("checkpoints/000000003.new/__0_0.distcp", "metrics.jsonl", "metrics.jsonl.new"):
                (learner / name).write_bytes(b"{}")
            spoil(learner / "checkpoints" / "000000002")
            (place / "round.toml").write_text("")
            await asyncio.to_thread(
                making.make, served.round.config, place / "round.toml", place / target, passphrase=None, tell=quiet
            )

    asyncio.run(make())
    return place / target


@pytest.mark.parametrize("target", ["folder", "file.tar"])
def test_a_restored_round_has_the_whole_checkpoint_and_no_draft(tmp_path: Path, target: str) -> None:
    saved = save(tmp_path, target)
    (tmp_path / "round").rename(tmp_path / "gone")
    restoring.restore(saved, tmp_path / "new", store_url="", passphrase=None, seen=(), nothing_newer=True, tell=quiet)
    learner = tmp_path / "new" / "learner"
    found = {path.relative_to(learner).as_posix() for path in learner.rglob("*") if path.is_file()}
    files = ("__0_0.distcp", ".metadata", "beside")
    assert found == {"metrics.jsonl", *(f"checkpoints/000000002/{name}" for name in files)}
    newest = checkpoint.newest(learner / "checkpoints")
    assert newest
    assert update_of(newest) == 2


def test_a_checkpoint_that_is_replaced_meanwhile_is_held_whole(tmp_path: Path) -> None:
    write(tmp_path / "checkpoints", 1)

    seen = set[int]()
    with subprocess.Popen([sys.executable, "-c", LEARNER, str(tmp_path / "checkpoints")]) as learner:
        while learner.poll() is None:
            held = making.hold_checkpoint(tmp_path / "checkpoints", tmp_path / "held")
            assert len(held) == 3
            seen.add(update_of(next(iter(held.values())).parent))
    assert learner.returncode == 0
    assert len(seen) > 1


@pytest.mark.parametrize("name", [".metadata", "beside", "__0_0.distcp"])
def test_a_checkpoint_that_lacks_a_file_is_not_saved(tmp_path: Path, name: str) -> None:
    with pytest.raises(BackupInvalid, match="No backup was made"):
        save(tmp_path, "b", lambda newest: (newest / name).unlink())
    assert not (tmp_path / "b").exists()


def test_a_checkpoint_that_is_cut_off_is_not_saved(tmp_path: Path) -> None:
    def cut(newest: Path) -> None:
        data = (newest / "__0_0.distcp").read_bytes()
        (newest / "__0_0.distcp").write_bytes(data[: len(data) // 2])

    with pytest.raises(BackupInvalid, match=r"__0_0\.distcp is missing"):
        save(tmp_path, "b", cut)


def test_a_learner_without_the_description_of_its_checkpoint_says_so(tmp_path: Path) -> None:
    """Backups of older coordinators lack the description; the settings are right."""
    write(tmp_path, 1)
    (tmp_path / "000000001" / ".metadata").unlink()
    with pytest.raises(ConfigInvalid, match=r"\.metadata is missing") as refused:
        update_of(tmp_path / "000000001")
    assert "lora_rank" not in refused.value.hint


def test_standby_copy_has_the_newest_checkpoint_that_a_learner_can_read_and_figures_that_grow(tmp_path: Path) -> None:
    """An unreadable checkpoint leaves the previous one in the copy, and stops nothing."""

    async def follow() -> None:
        async with serve(tmp_path) as served:
            learner = served.round.folder / "learner"
            enough, figures = threading.Event(), learner / "metrics.jsonl"
            write(learner / "checkpoints", 1)

            def grow() -> None:
                with figures.open("ab", buffering=0) as file:
                    while not enough.wait(0.001):
                        file.write(b"{}\n" * 1000)

            growing = threading.Thread(target=grow)
            growing.start()
            (tmp_path / "round.toml").write_text("")
            try:
                with Follower(
                    served.round.config, tmp_path / "round.toml", tmp_path / "copy", None, quiet
                ) as following:
                    await asyncio.to_thread(following.step)
                    for update in (2, 3):
                        write(learner / "checkpoints", update)
                        if update == 3:
                            (learner / "checkpoints" / "000000003" / "beside").write_bytes(b"no checkpoint")
                        await asyncio.to_thread(following.step)
            finally:
                enough.set()
                growing.join()

    asyncio.run(follow())
    copy = tmp_path / "copy"
    restoring.restore(copy, tmp_path / "new", store_url="", passphrase=None, seen=(), nothing_newer=True, tell=quiet)
    newest = checkpoint.newest(tmp_path / "new" / "learner" / "checkpoints")
    assert newest
    assert update_of(newest) == 2
    assert (tmp_path / "new" / "learner" / "metrics.jsonl").read_bytes().startswith(b"{}\n")
