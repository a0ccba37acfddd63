"""Roots are entries: each that is served is in the log once, and a round that serves others does not start."""

import shutil
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tuf.api.metadata import Metadata
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.config import Config, load
from coordinator.publishing import rotation
from coordinator.publishing.signed_metadata import LEDGER, RoleKeys, SignedMetadata
from coordinator.service.opening import open_books
from coordinator.service.round import Round
from coordinator.store.state import Database
from ledger import store
from ledger.checkpoint import open_checkpoint
from ledger.entry import Entry, Root
from protocol import limits
from protocol.errors import ConfigInvalid
from protocol.policy import chunks
from protocol.text.plain import counted
from tests.coordinator.world import clear

NOW = datetime.now(UTC)
BUDGET_MICROS = 1_000


class Place:
    """A round that is not running: its folder and its store."""

    def __init__(self, folder: Path, store_url: str) -> None:
        self.folder = folder
        self.settings = [f"round.directory={folder}", f"market.budget_micros={BUDGET_MICROS}"]
        if store_url:
            clear(store_url)
            self.settings.append(f"store.url={store_url}")

    @property
    def config(self) -> Config:
        return load(None, self.settings)

    @property
    def metadata(self) -> SignedMetadata:
        return SignedMetadata(self.folder / "keys", self.folder / "metadata", 600.0)

    def start(self) -> None:
        """Lead the round for a moment."""
        Round(self.config).close()

    def rotate(self, role: str = "timestamp", folder: Path | None = None) -> bytes:
        """Replace keys, as the operator does; the new root, as it is served."""
        keys = RoleKeys((folder or self.folder) / "keys")
        metadata = SignedMetadata(keys.folder, (folder or self.folder) / "metadata", 600.0)
        rotation.install(metadata, keys, rotation.prepare(metadata, keys, role, 1, 1, NOW), NOW)
        return metadata.roots()[-1]

    def entries(self) -> list[Entry]:
        database = Database(self.config.state)
        found = [row.entry for row in database.run_now(store.entries, 0, 1_000)]
        assert database.run_now(store.rebuild) == []
        database.close()
        return found

    def logged(self) -> list[Root]:
        return [entry for entry in self.entries() if isinstance(entry, Root)]

    def served(self) -> list[Root]:
        """Return the roots that the log should name for the files."""
        return [
            Root(version=number, root_digest=chunks.digest((self.folder / f"metadata/{number}.root.json").read_bytes()))
            for number in range(1, self.metadata.root().version + 1)
        ]

    def files(self) -> dict[str, bytes]:
        """Return the public files of the trust metadata."""
        return {path.name: path.read_bytes() for path in (self.folder / "metadata").iterdir()}

    def fsck(self) -> tuple[int, str]:
        file = self.folder / "round.toml"
        file.touch()
        settings = [word for setting in self.settings for word in ("--set", setting)]
        result = CliRunner().invoke(app, ["fsck", str(file), *settings])
        return result.exit_code, result.output


@pytest.fixture
def place(tmp_path: Path, store_url: str) -> Place:
    return Place(tmp_path / "round", store_url)


def test_the_first_root_is_logged_before_anything_is_served(place: Place) -> None:
    round_ = Round(place.config)
    assert place.logged() == place.served()
    assert [entry.version for entry in place.logged()] == [1]
    round_.close()


def test_a_restart_logs_nothing_twice(place: Place) -> None:
    place.start()
    before = place.entries()
    place.start()
    assert place.entries() == before


@pytest.mark.parametrize("role", ["timestamp", "root", LEDGER])
def test_each_rotation_is_one_entry(place: Place, role: str) -> None:
    place.start()
    before = place.entries()
    for rotations in (1, 2):
        place.rotate(role)
        for _ in range(2):
            place.start()
        assert place.entries()[len(before) :] == place.served()[1:]
        assert len(place.logged()) == 1 + rotations
    assert place.fsck() == (0, f"{len(before) + 2} entries, 0 differences\n")


def test_a_round_that_began_without_such_entries_gets_all_of_them(place: Place) -> None:
    metadata = SignedMetadata.create(place.folder / "keys", place.folder / "metadata", 600.0, NOW)
    database = Database(place.config.state)
    database.run_now(open_books, metadata.round_id, BUDGET_MICROS, 0)
    database.close()
    place.rotate()
    place.rotate(LEDGER)
    before = place.entries()
    assert place.logged() == []
    (place.folder / "resolved.json").write_text(place.config.model_dump_json())
    assert place.fsck() == (0, f"{counted(len(before), 'entry', 'entries')}, 0 differences\n")
    place.start()
    assert place.entries()[: len(before) + 3] == before + place.served()


KILLED = """
import os, signal, sys
from coordinator.config import load
from coordinator.service.round import Round

Round(load(None, sys.argv[1:]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_coordinator_that_is_killed_between_entry_and_checkpoint_goes_on_with_the_entry(place: Place) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, *place.settings], cwd=place.folder.parent, check=False)
    assert killed.returncode == -signal.SIGKILL
    logged = place.logged()
    assert logged == place.served()
    database = Database(place.config.state)
    assert database.run_now(store.checkpoint) is None
    database.close()
    round_ = Round(place.config)
    note = round_.database.run_now(store.publish, round_.ledger_key, round_.metadata.sign_for_ledger)
    assert open_checkpoint(note, [round_.ledger_key]).size == len(place.entries())
    round_.close()
    assert place.logged() == logged


class TestOtherFiles:
    """Files that differ from the log: nothing is signed."""

    def refuses(self, place: Place, number: int) -> None:
        before, files = place.entries(), place.files()
        with pytest.raises(ConfigInvalid, match=f"{number}.root.json") as refused:
            place.start()
        assert "backup" in refused.value.hint
        assert (place.entries(), place.files()) == (before, files)
        code, said = place.fsck()
        assert code == 1
        assert f"{number}.root.json" in said
        assert said.endswith(f"{len(before)} entries, 1 difference\n")

    @pytest.mark.parametrize("role", ["timestamp", LEDGER])
    def test_a_root_that_was_replaced_by_another_of_its_number_is_refused(self, place: Place, role: str) -> None:
        place.start()
        other = place.folder.parent / "other"
        for name in ("keys", "metadata"):
            shutil.copytree(place.folder / name, other / name)
        place.rotate(role)
        place.start()
        lie = place.rotate(role, other)
        (place.folder / "metadata" / "2.root.json").write_bytes(lie)
        self.refuses(place, 2)

    @pytest.mark.parametrize("number", [1, 2])
    def test_a_root_that_was_taken_away_is_refused(self, place: Place, number: int) -> None:
        place.start()
        place.rotate()
        place.start()
        (place.folder / "metadata" / f"{number}.root.json").unlink()
        self.refuses(place, number)

    @pytest.mark.parametrize("number", [1, 2])
    def test_a_root_that_was_only_written_anew_is_refused(self, place: Place, number: int) -> None:
        """Other bytes are another root, though the keys in it are the same."""
        place.start()
        place.rotate()
        place.start()
        path = place.folder / "metadata" / f"{number}.root.json"
        before = path.read_bytes()
        path.write_bytes(before + b"\n")
        self.refuses(place, number)
        told = place.fsck()[1]
        assert chunks.digest(before) in told
        assert chunks.digest(before + b"\n") in told


def test_a_root_that_no_reader_would_follow_is_not_made(tmp_path: Path) -> None:
    metadata = SignedMetadata.create(tmp_path / "keys", tmp_path / "metadata", 600.0, NOW)
    last = Metadata(metadata.root())
    last.signed.version = limits.ROOT_ROTATIONS_MAX
    last.to_file(str(tmp_path / "metadata" / f"{last.signed.version}.root.json"))
    before = sorted((tmp_path / "keys").iterdir())
    with pytest.raises(ConfigInvalid, match="cannot be replaced any more"):
        rotation.prepare(metadata, RoleKeys(tmp_path / "keys"), LEDGER, 1, 1, NOW)
    assert sorted((tmp_path / "keys").iterdir()) == before


def test_only_who_leads_logs(tmp_path: Path, postgres_url: str) -> None:
    place = Place(tmp_path / "round", postgres_url)
    place.start()
    place.rotate()
    before = place.entries()
    with pytest.raises(ConfigInvalid, match="other settings or keys"):
        Round.beside(place.folder)
    assert place.entries() == before
