"""The copy of a store that `upgrade` makes, restored with the rest of its round's folder."""

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.config import Config, load
from coordinator.service.backup import making, restoring
from coordinator.service.backup.archive import BackupInvalid
from coordinator.service.opening import only_coordinator
from coordinator.store.state import Database
from ledger import store
from protocol.errors import ConfigInvalid
from tests.coordinator.old_stores import make_old, wipe
from tests.coordinator.served import Served, serve


def quiet(_what: str, _done: int, _total: int) -> None:
    """Ignore progress."""


async def work(served: Served) -> None:
    """Add a group, covered by a signed checkpoint."""
    node = await served.join()
    (lease,) = await served.lease(node)
    await served.submit(node, served.answer(node, lease))
    await served.round.publish_checkpoint()


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The copy of a stopped round's store, where `upgrade` puts it."""
    (tmp_path / "round.toml").write_text("[market]\nbudget_micros = 7\n")

    async def make() -> Config:
        async with serve(tmp_path) as served:
            await served.publish()
            await work(served)
            return served.round.config

    config = asyncio.run(make())
    copy = config.round.directory / "backups" / "schema-1-now"
    making.save_store(config, tmp_path / "round.toml", copy, quiet)
    return copy


def restore(source: Path, folder: Path) -> None:
    restoring.restore(source, folder, store_url="", passphrase=None, seen=(), nothing_newer=True, tell=quiet)


def test_a_copy_is_restored_with_the_rest_of_its_round(copied: Path, tmp_path: Path) -> None:
    round_, new = copied.parent.parent, tmp_path / "new"
    (round_ / "mine").mkdir()
    (round_ / "mine" / "some notes").write_text("notes")
    (round_ / "state.db").write_bytes(b"half migrated")
    (round_ / "state.db-wal").unlink(missing_ok=True)
    restore(copied, new)
    for name in ("keys", "metadata", "blobs", "mine"):
        files = {path.relative_to(round_ / name) for path in (round_ / name).rglob("*") if path.is_file()}
        assert {path.relative_to(new / name) for path in (new / name).rglob("*") if path.is_file()} == files
    assert (new / "operator.token").read_text() == (round_ / "operator.token").read_text()
    assert not (new / "backups").exists()
    assert Config.model_validate_json((new / "resolved.json").read_bytes()).round.directory == new
    with closing(Database(new / "state.db")) as database:
        assert database.run_now(store.size) > 2
        assert database.run_now(store.rebuild) == []
    assert (new / "keys").stat().st_mode & 0o077 == 0


def test_a_round_that_went_on_after_its_copy_is_not_taken_back(copied: Path, tmp_path: Path) -> None:
    async def go_on() -> None:
        async with serve(tmp_path) as served:
            await work(served)

    asyncio.run(go_on())
    with pytest.raises(BackupInvalid, match="sign a second history"):
        restore(copied, tmp_path / "new")
    assert not list(tmp_path.glob("*new*"))


def test_a_copy_is_of_use_where_its_round_is(copied: Path, tmp_path: Path) -> None:
    shutil.copytree(copied, tmp_path / "elsewhere" / "copy")
    with pytest.raises(BackupInvalid, match="the store alone") as refused:
        restore(tmp_path / "elsewhere" / "copy", tmp_path / "new")
    assert "backups/" in refused.value.hint


def test_a_round_that_runs_is_not_copied(copied: Path, tmp_path: Path) -> None:
    with only_coordinator(copied.parent.parent), pytest.raises(ConfigInvalid, match="is running"):
        restore(copied, tmp_path / "new")


@pytest.fixture(params=["sqlite", "postgresql"])
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Config]:
    """A round whose store has the first schema."""
    folder = tmp_path / "round"
    folder.mkdir()
    settings = [f"round.directory={folder}"]
    if request.param == "postgresql":
        settings.append(f"store.url={request.getfixturevalue('postgres_url')}")
    config = load(None, settings)
    make_old(config.state)
    (folder / "resolved.json").write_text(config.model_dump_json())
    yield config
    if config.store.url:
        wipe(config.store.url)


def test_what_an_upgrade_copies_says_what_it_is(old: Config, tmp_path: Path) -> None:
    (tmp_path / "round.toml").write_text("")
    settings = [f"round.directory={old.round.directory}", f"store.url={old.store.url}"]
    words = ["upgrade", str(tmp_path / "round.toml"), *(word for one in settings for word in ("--set", one))]
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 0, ran.output
    (copy,) = (old.round.directory / "backups").iterdir()
    assert f"swarm-coordinator restore {copy}" in ran.output
    found = restoring.describe(copy)
    assert (found.schema_number, found.folder, found.keys) == (1, "as it is", "left out")
    assert found.ledger_size > 10
    assert found.database == ("postgresql" if old.store.url else "sqlite")
