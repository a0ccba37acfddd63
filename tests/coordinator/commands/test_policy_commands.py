"""`policy list`, `show` and `verify`: what was published is told as it is, and whatever differs from it is named."""

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from protocol.ids import ChunkId
from protocol.policy import chunks
from protocol.policy.manifest import FileEntry, PolicyManifest, target_path
from tests.coordinator.served import SETTINGS, serve
from tests.safetensors_files import next_file, policy_file

STALENESS = "staleness.max_updates=1"
"""Three versions are kept."""

FILE = "model.safetensors"


def versions() -> list[bytes]:
    """Return weights of versions: the third equals the first; the last two are patches of the previous ones."""
    first, second = policy_file(1), policy_file(2)
    fourth = next_file(first, seed=4)
    return [first, second, first, fourth, next_file(fourth, seed=5)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A round with five versions, its coordinator stopped."""
    folder = tmp_path_factory.mktemp("made")

    async def run() -> None:
        async with serve(folder, STALENESS) as served:
            for number, weights in enumerate(versions(), start=1):
                await served.publish(number, weights)

    asyncio.run(run())
    return folder


class Copy:
    """A copy of that round, to be damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metadata = folder / "metadata"

    def say(self, command: str, *words: str) -> tuple[int, str]:
        config = self.folder / "round.toml"
        config.write_text("")
        settings = [f"round.directory={self.folder}", *SETTINGS, STALENESS]
        options = [word for setting in settings for word in ("--set", setting)]
        done = CliRunner().invoke(app, ["policy", command, str(config), *words, *options])
        return done.exit_code, done.stdout if done.exception is None or done.exit_code == 3 else str(done.exception)

    def json(self, command: str, *words: str) -> Any:
        code, told = self.say(command, *words, "--json")
        assert code in (0, 3), told
        return json.loads(told)

    def verify(self, version: int) -> list[str]:
        """Verify a version; return the differences."""
        found: list[str] = self.json("verify", str(version))["differences"]
        return found

    def manifest(self, version: int) -> PolicyManifest:
        return PolicyManifest.from_bytes((self.metadata / target_path(version)).read_bytes())

    def weights(self, version: int) -> FileEntry:
        (entry,) = (entry for entry in self.manifest(version).files if entry.path == FILE)
        return entry

    def blob(self, name: str) -> Path:
        return self.folder / "blobs" / chunks.blob_path(ChunkId(name))

    def newest(self, role: str) -> Path:
        return max(self.metadata.glob(f"*.{role}.json"), key=lambda path: int(path.name.partition(".")[0]))


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Copy:
    shutil.copytree(made / "round", tmp_path / "round")
    return Copy(tmp_path / "round")


def test_the_list_says_what_each_version_costs_and_which_are_kept(copy: Copy) -> None:
    rows = copy.json("list")
    assert [row["version"] for row in rows] == [5, 4, 3, 2, 1]
    assert [row["update"] for row in rows] == [4, 3, 2, 1, 0]
    assert [row["signed"] for row in rows] == [True, True, True, False, False]
    assert [row["kept"] for row in rows] == [True, True, True, False, True]  # the third is the first again
    size_bytes = len(policy_file(1))
    assert all(size_bytes < row["size_bytes"] < 2 * size_bytes for row in rows)
    assert rows[0]["patch_bytes"] == sum(patch.size_bytes for patch in copy.weights(5).patches[-1:]) < size_bytes // 2
    assert rows[2]["patch_bytes"] >= size_bytes
    assert rows[4]["patch_bytes"] is rows[0]["adapter_bytes"] is rows[0]["broadcast"] is None
    assert [row["version"] for row in copy.json("list", "--last", "2")] == [5, 4]


def test_what_people_read_names_every_version_and_file(copy: Copy) -> None:
    code, told = copy.say("list")
    assert code == 0
    assert "version 2, update 1" in told
    *lines, last = told.splitlines()
    assert [line.count("gone") for line in lines] == [0, 0, 0, 1, 0]
    assert last.startswith("STOPPED since ")
    code, told = copy.say("show", "5")
    assert code == 0
    assert copy.weights(5).digest in told
    assert "2 patches" in told
    roles = copy.json("show", "5")["signers"]
    assert {role: len(signed["keys"]) for role, signed in roles.items()} == dict.fromkeys(roles, 1)
    assert set(roles) == {"root", "timestamp", "snapshot", "targets"}


@pytest.mark.parametrize("version", [3, 4, 5])
def test_an_honest_version_is_whole(copy: Copy, version: int) -> None:
    assert copy.weights(5).patches_after_anchor == 2
    code, told = copy.say("verify", str(version))
    assert (code, "every digest as signed" in told) == (0, True)


def test_a_version_off_the_list_is_vouched_for_by_those_after_it(copy: Copy) -> None:
    assert copy.verify(1) == []
    other = copy.metadata / target_path(2)
    other.write_bytes(copy.manifest(2).model_copy(update={"update": 7}).to_bytes())
    assert "version 2 names another" not in "".join(copy.verify(1))  # its word for the first is the same
    assert "version 3 has another parent" in "".join(copy.verify(1))


def test_a_version_that_is_gone_is_no_difference_but_an_error(copy: Copy) -> None:
    code, told = copy.say("verify", "2")
    assert (code, "was deleted" in told) == (1, True)
    code, told = copy.say("verify", "6")
    assert (code, "was not published" in told) == (1, True)


def shorter(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (shorter, "bytes of"),
        (longer, "larger than"),
        (flipped, "holds the bytes of"),
        (a_folder, "is not a file"),
        (Path.unlink, "is missing"),
    ],
)
@pytest.mark.parametrize("where", ["anchor", "patch"])
def test_a_damaged_chunk_is_named(copy: Copy, where: str, damage: Callable[[Path], None], said: str) -> None:
    entry = copy.weights(5)
    name = entry.chunks[0] if where == "anchor" else entry.patches[-1].chunks[0]
    damage(copy.blob(name))
    assert copy.say("verify", "5")[0] == 3
    found = copy.verify(5)
    assert found[-1] == f"{FILE}: cannot be rebuilt"
    assert [line for line in found if name[:12] in line and said in line]
    if where == "patch":
        assert copy.verify(4) == []


def test_all_damage_is_told_and_not_the_first_alone(copy: Copy) -> None:
    for name in copy.weights(5).chunks[:3]:
        flipped(copy.blob(name))
    assert len(copy.verify(5)) == 4


def test_a_manifest_of_other_files_is_not_taken_for_the_signed_one(copy: Copy) -> None:
    """All its files can be rebuilt, but nobody signed it."""
    forged = copy.manifest(4).model_copy(update={"version": 5})
    (copy.metadata / target_path(5)).write_bytes(forged.to_bytes())
    found = copy.verify(5)
    assert any("the store has" in line for line in found)
    assert any(line.startswith("trust metadata") for line in found)


@pytest.mark.parametrize("damage", [flipped, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_manifest_that_cannot_be_read_is_a_difference(copy: Copy, damage: Callable[[Path], None]) -> None:
    damage(copy.metadata / target_path(4))
    assert copy.verify(4)
    assert copy.json("show", "4")["kept"] is False


@pytest.mark.parametrize("role", ["targets", "snapshot", "root"])
def test_trust_metadata_that_nobody_signed_is_a_difference(copy: Copy, role: str) -> None:
    path = copy.newest(role)
    document = json.loads(path.read_text())
    document["signatures"][0]["sig"] = "00" * 64
    path.write_text(json.dumps(document))
    assert any(line.startswith("trust metadata") for line in copy.verify(5))


def test_a_store_that_says_something_else_is_a_difference(copy: Copy) -> None:
    with closing(sqlite3.connect(copy.folder / "state.db")) as store, store:
        store.execute("UPDATE versions SET manifest_digest = ? WHERE version = 4", ("0" * 64,))
    (line,) = copy.verify(4)
    assert "the store has 0000" in line
