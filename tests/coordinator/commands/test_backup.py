"""Backups that are damaged, hostile, half there or not to be used; and stores copied and loaded."""

import asyncio
import io
import json
import os
import shlex
import shutil
import sqlite3
import tarfile
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from blake3 import blake3
from hypothesis import assume, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from coordinator import cli
from coordinator.base.files import full_disk_named
from coordinator.commands.backup import settings_of
from coordinator.config import AuditSection, Config, load
from coordinator.publishing.signed_metadata import SignedMetadata
from coordinator.service import opening
from coordinator.service.backup import database, making, restoring
from coordinator.service.backup.archive import BackupInvalid, escaped, plain, reading, seal, unseal, writing
from coordinator.store.state import Database
from coordinator.transactions.policy_versions import newest_version
from ledger import store
from protocol.errors import ConfigInvalid, DiskFull
from protocol.ids import ChunkId
from protocol.policy import chunks
from protocol.policy.manifest import open_manifest, target_path
from tests.coordinator.old_stores import make_old, schema_of, wipe
from tests.coordinator.served import serve
from tests.coordinator.world import World

PASSPHRASE = "correct horse"
LOCAL_KEY = "local/node-1/node.key"
"""The key of a node of the operator's own."""


def quiet(_what: str, _done: int, _total: int) -> None:
    """Ignore progress."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a stopped round of two versions in `round` and its backups `folder` and `file.tar`."""
    place = tmp_path_factory.mktemp("saved")
    settings = place / "round.toml"
    settings.write_text("[market]\nbudget_micros = 7\n")

    async def make() -> None:
        async with serve(place) as served:
            await served.publish()
            node = await served.join()
            (lease,) = await served.lease(node)
            await served.submit(node, served.answer(node, lease))
            await served.publish(2, b"other weights")
            await served.round.publish_checkpoint()
            rebuilt = place / "round" / "auditors" / "launched" / "1"
            rebuilt.mkdir(parents=True)
            (rebuilt / "config.json").write_text("{}")
            (place / "round" / LOCAL_KEY).parent.mkdir(parents=True)
            (place / "round" / LOCAL_KEY).write_text(f"{7:064x}")
            for target in ("folder", "file.tar"):
                await asyncio.to_thread(
                    making.make, served.round.config, settings, place / target, passphrase=PASSPHRASE, tell=quiet
                )

    asyncio.run(make())
    (place / "round").rename(place / "gone")
    return place


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A backup that a test may spoil."""
    shutil.copytree(saved / "folder", tmp_path / "copy")
    return tmp_path / "copy"


def restore(source: Path, folder: Path, *, passphrase: str = PASSPHRASE, nothing_newer: bool = True) -> None:
    restoring.restore(
        source, folder, store_url="", passphrase=passphrase, seen=(), nothing_newer=nothing_newer, tell=quiet
    )


@pytest.mark.parametrize("name", ["folder", "file.tar"])
def test_a_restored_folder_is_the_round_as_it_was(saved: Path, tmp_path: Path, name: str) -> None:
    restore(saved / name, tmp_path / "new")
    was = {path.relative_to(saved / "gone") for path in (saved / "gone").rglob("*") if path.is_file()}
    now = {path.relative_to(tmp_path / "new") for path in (tmp_path / "new").rglob("*") if path.is_file()}
    left_out = {"backup.lock", "state.db-wal", "state.db-shm", "draft", "auditors/launched/1/config.json"}
    assert {str(path) for path in was - now if path.parts[0] != "uploads"} <= left_out
    assert {str(path) for path in now - was} <= {"restored.json", "operator.toml"}
    for path in now & was - {Path("state.db"), Path("resolved.json")}:
        assert (tmp_path / "new" / path).read_bytes() == (saved / "gone" / path).read_bytes(), path
    assert (tmp_path / "new" / "keys" / "root.pem").stat().st_mode & 0o077 == 0


def test_the_line_that_goes_on_has_all_that_the_lost_round_was_launched_with(saved: Path, tmp_path: Path) -> None:
    """The round's file has few settings; most were given on the command line."""
    new = tmp_path / "a new place"
    restore(saved / "folder", new)
    file, *options = shlex.split(settings_of(new))
    assert file == str(new / "operator.toml")
    assert set(options[::2]) == {"--set"}
    ran = Config.model_validate_json((new / "resolved.json").read_bytes())
    assert load(Path(file), options[1::2]) == ran
    assert ran.learner.groups_per_update == 2
    assert load(Path(file), []).round.directory == new, "a command without options works on the restored round"


def test_leases_of_a_restored_round_have_the_time_that_was_left_at_the_backup(saved: Path, tmp_path: Path) -> None:
    restore(saved / "folder", tmp_path / "new")
    assert opening.touched_ms(tmp_path / "new") == pytest.approx(restoring.describe(saved / "folder").made_ms, abs=1)


def test_rebuilt_versions_of_auditors_are_not_saved(saved: Path) -> None:
    assert (saved / "gone" / "auditors" / "launched" / "1" / "config.json").exists()
    assert not (saved / "folder" / "folder" / "auditors").exists()


def test_the_uploads_of_a_version_whose_chunks_are_saved_are_not_saved_again(saved: Path) -> None:
    assert list((saved / "gone" / "uploads" / "2").iterdir())
    assert not (saved / "folder" / "folder" / "uploads").exists()


def test_store_that_does_not_fit_on_the_disk_is_a_full_disk_and_no_crash(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "small.db")) as small:
        small.execute("PRAGMA max_page_count = 1")
        with pytest.raises(DiskFull, match=r"database or disk is full"), full_disk_named(tmp_path):
            small.execute("CREATE TABLE t (x)")


def test_restore_without_a_passphrase_names_only_options_that_it_has(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())  # a terminal would be asked
    result = CliRunner().invoke(cli.app, ["restore", str(saved / "folder"), str(tmp_path / "new"), "--nothing-newer"])
    assert isinstance(result.exception, ConfigInvalid)
    assert result.exception.hint == "Give the passphrase with --passphrase-file."


def test_no_key_and_no_token_is_readable_in_a_backup(saved: Path) -> None:
    secrets = [*(saved / "gone" / "keys").iterdir(), saved / "gone" / "operator.token", saved / "gone" / LOCAL_KEY]
    everything = (saved / "file.tar").read_bytes()
    assert len(secrets) > 6
    assert not [path.name for path in secrets if path.read_bytes() in everything]


def assert_the_newest_version_is_whole(folder: Path, version: int) -> None:
    """Store and documents name the same one, and every chunk that leads to it is there."""
    assert making.newest_document(folder) == version
    with closing(Database(folder / "state.db")) as database:
        assert database.run_now(newest_version)[0] == version
    round_id = SignedMetadata(folder / "keys", folder / "metadata", 0.0).round_id
    manifest = open_manifest(
        (folder / "metadata" / target_path(version)).read_bytes(), round_id=round_id, version=version
    )
    for name, size_bytes in manifest.chunk_sizes().items():
        assert (folder / "blobs" / chunks.blob_path(ChunkId(name))).stat().st_size == size_bytes


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["store/state.db", "keys.sealed", "operator.toml", "folder/metadata/1.root.json"])
def test_a_flipped_bit_anywhere_is_found_before_anything_is_restored(copy: Path, tmp_path: Path, name: str) -> None:
    spoil(copy / name)
    with pytest.raises(BackupInvalid, match=f"{name} of the backup is damaged"):
        restore(copy, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob(".new*"))


ODD = [
    b"two words",
    b"caf\xc3\xa9",
    b"latin \xe9",
    b"100%",
    b"%41",
    b"-rf",
    b"a\nb",
    b"\\",
    b"~",
    b"x" * 255,
    b"\xff" * 255,
]
"""Names that a file may have: all but `/`, NUL, and what the file system keeps for itself."""


@pytest.mark.parametrize("name", ["folder", "file.tar"])
def test_files_of_any_name_are_saved_and_restored(saved: Path, tmp_path: Path, name: str) -> None:
    """A reward that an operator wrote, notes beside it: whatever lies in the folder."""
    shutil.copytree(saved / "gone", tmp_path / "round")
    for number, odd in enumerate(map(os.fsdecode, ODD)):
        place = tmp_path / "round" / "mine" / odd / "deep"
        place.mkdir(parents=True)
        (place / odd).write_bytes(b"%d" % number)
    (tmp_path / "round" / "mine" / os.fsdecode(b"\xe9.key")).write_bytes(b"secret")
    config = load(None, [f"round.directory={tmp_path / 'round'}"])
    making.make(config, saved / "round.toml", tmp_path / name, passphrase=PASSPHRASE, tell=quiet)
    (tmp_path / "round").rename(tmp_path / "gone")
    restore(tmp_path / name, tmp_path / "new")
    mine = tmp_path / "new" / "mine"
    for number, odd in enumerate(map(os.fsdecode, ODD)):
        assert (mine / odd / "deep" / odd).read_bytes() == b"%d" % number, odd
    assert (mine / os.fsdecode(b"\xe9.key")).read_bytes() == b"secret"


def test_half_a_backup_is_none(saved: Path, copy: Path, tmp_path: Path) -> None:
    next(iter((copy / "folder" / "blobs").glob("*/*"))).unlink()
    with pytest.raises(BackupInvalid, match="has no file"):
        restore(copy, tmp_path / "new")
    data = (saved / "file.tar").read_bytes()
    (tmp_path / "half.tar").write_bytes(data[: len(data) // 2])
    with pytest.raises(BackupInvalid):
        restore(tmp_path / "half.tar", tmp_path / "new")


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/evil", "folder/../../evil", "folder//evil", "folder/./evil", "a\0b", "a/..", ""]
)
def test_a_name_that_leaves_the_folder_is_refused(copy: Path, tmp_path: Path, name: str) -> None:
    contents = json.loads((copy / "backup.json").read_text())
    contents["files"].append({"name": name, "size_bytes": 0, "digest": "0" * 64})
    (copy / "backup.json").write_text(json.dumps(contents))
    with pytest.raises(BackupInvalid, match="is not a valid file name in a backup"):
        restore(copy, tmp_path / "new")


@pytest.mark.parametrize("path", ["%2E%2E/evil", "%2Fevil", "a%00b", "%C3%A9", "%e9", "%", "%2", "%25%", "\ud800"])
def test_a_file_has_one_name_in_a_backup(path: str) -> None:
    """A path in another spelling could name another file, or a file outside the folder."""
    with pytest.raises(BackupInvalid, match="is not a valid file name in a backup"):
        plain(path)


@given(st.lists(st.binary(min_size=1, max_size=8), min_size=1, max_size=4).map(b"/".join))
def test_every_path_has_a_name_in_a_backup_that_stands_for_it(path: bytes) -> None:
    assume(b"\0" not in path and all(part not in (b"", b".", b"..") for part in path.split(b"/")))
    name = escaped(os.fsdecode(path))
    name.encode()
    assert os.fsencode(plain(name)) == path


def test_a_link_in_a_backup_is_not_followed(copy: Path, tmp_path: Path) -> None:
    target = copy / "operator.toml"
    (tmp_path / "secret").write_bytes(target.read_bytes())
    target.unlink()
    target.symlink_to(tmp_path / "secret")
    with pytest.raises(BackupInvalid, match="has no file"):
        restore(copy, tmp_path / "new")


def test_a_wrong_passphrase_gives_nothing(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(BackupInvalid, match="passphrase"):
        restore(saved / "folder", tmp_path / "new", passphrase="wrong")
    assert not list(tmp_path.iterdir())
    sealed = seal({"keys/a": b"1"}, "one", b"beside")
    assert unseal(sealed, "one", b"beside") == {"keys/a": b"1"}
    for cut in (0, 10, len(sealed) - 1):
        with pytest.raises(BackupInvalid):
            unseal(sealed[:cut], "one", b"beside")
    with pytest.raises(BackupInvalid, match="changed"):
        unseal(sealed, "one", b"something else")


@pytest.mark.parametrize("name", ["folder/resolved.json", "operator.toml", "folder/reward.py"])
def test_who_can_write_where_backups_lie_puts_nothing_into_one(copy: Path, tmp_path: Path, name: str) -> None:
    (copy / name).write_bytes((copy / name).read_bytes() + b" " if (copy / name).exists() else b"import os")
    contents = json.loads((copy / "backup.json").read_text())
    digest = blake3((copy / name).read_bytes()).hexdigest()
    entry = {"name": name, "size_bytes": (copy / name).stat().st_size, "digest": digest}
    contents["files"] = [one for one in contents["files"] if one["name"] != name] + [entry]
    (copy / "backup.json").write_text(json.dumps(contents))
    with pytest.raises(BackupInvalid, match="the backup was changed"):
        restore(copy, tmp_path / "new")
    assert not list(tmp_path.glob("*new*"))


def test_nothing_is_written_over(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigInvalid, match="is not overwritten"):
        restore(saved / "folder", tmp_path / "there")


def test_who_says_nothing_of_newer_checkpoints_restores_nothing(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(BackupInvalid, match="--seen"):
        restore(saved / "folder", tmp_path / "new", nothing_newer=False)


def test_a_store_whose_ledger_does_not_add_up_is_not_saved(tmp_path: Path) -> None:
    async def make() -> None:
        async with serve(tmp_path) as served:
            await served.publish()
            tamper = sa.text("UPDATE ledger_balances SET micros = micros + 1 WHERE account = 'budget'")
            await served.round.database.run(lambda connection: connection.execute(tamper))
            with pytest.raises(BackupInvalid, match="contradicts its ledger"):
                await asyncio.to_thread(
                    making.make, served.round.config, tmp_path, tmp_path / "b", passphrase=None, tell=quiet
                )

    asyncio.run(make())
    assert not (tmp_path / "b").exists()


def test_files_of_a_failed_attempt_to_hold_a_moment_are_removed(saved: Path, tmp_path: Path) -> None:
    """Copies of a hundred attempts would fill the disk of the backup."""
    shutil.copytree(saved / "gone", tmp_path / "round")
    config = load(None, [f"round.directory={tmp_path / 'round'}"])
    with closing(sqlite3.connect(config.state)) as store_file:
        store_file.execute("DELETE FROM versions WHERE version = 2")
        store_file.commit()
    with making._staging(tmp_path / "round", tmp_path / "b.tar") as staged:
        held = making._moment(config, staged, set(), attempts=2)
        with pytest.raises(BackupInvalid, match="at each of 2 attempts"), held:
            raise AssertionError("the documents name a version that the store does not have")
        assert not list(staged.folder.iterdir())


def test_a_full_disk_leaves_no_backup(saved: Path, tiny_disk: Path) -> None:
    config: Config = load(None, [f"round.directory={saved / 'gone'}"])
    with pytest.raises(DiskFull):
        making.make(config, saved / "round.toml", tiny_disk / "b.tar", passphrase=None, tell=quiet)
    assert not list(tiny_disk.iterdir())


@pytest.mark.parametrize("name", ["folder", "file.tar"])
def test_a_round_whose_disk_is_full_is_saved_on_another_disk(
    saved: Path, small_disk: Path, tmp_path: Path, name: str
) -> None:
    """An operator wants a backup then: before anything is deleted."""
    shutil.copytree(saved / "gone", small_disk / "round")
    with suppress(OSError), (small_disk / "rest").open("wb") as rest:
        while True:
            rest.write(bytes(4096))
    assert shutil.disk_usage(small_disk).free == 0
    config = load(None, [f"round.directory={small_disk / 'round'}"])
    making.make(config, saved / "round.toml", tmp_path / "other" / name, passphrase=PASSPHRASE, tell=quiet)
    assert [path.name for path in (tmp_path / "other").iterdir()] == [name]
    (small_disk / "round").rename(small_disk / "gone")
    restore(tmp_path / "other" / name, tmp_path / "new")
    assert_the_newest_version_is_whole(tmp_path / "new", 2)


def test_a_file_that_grows_while_it_is_saved_is_taken_as_it_was(tmp_path: Path) -> None:
    with writing(tmp_path / "b.tar") as (writer, partial):
        entry = writer.add("a", io.BytesIO(b"12345678"), 5)
    assert entry.size_bytes == 5
    with reading(partial) as reader, reader.open("a") as file:
        assert file.read() == b"12345"
    with tarfile.open(partial) as tar:
        assert tar.getnames() == ["a"]


def described(connection: sa.Connection) -> dict[str, Any]:
    """The schema, with whether an index is partial: PostgreSQL writes the same condition in ever new ways."""
    found = schema_of(connection)
    for table in found.values():
        table["indexes"] = {name: (*index[:2], bool(index[2])) for name, index in table["indexes"].items()}
    return found


@pytest.fixture
def empty_postgres(postgres_url: str) -> Iterator[str]:
    yield postgres_url
    wipe(postgres_url)


def test_a_postgresql_is_copied_and_loaded_whole(empty_postgres: str, tmp_path: Path) -> None:
    """The copy has all schemas, and its sequences continue."""
    make_old(empty_postgres)
    rows = list[object]()

    def count(connection: sa.Connection) -> None:
        connection.exec_driver_sql("SELECT 1")
        rows.append(store.rebuild(connection, locked=False))
        rows.append(described(connection))

    database.save(empty_postgres, tmp_path / "copy", quiet, count)
    with pytest.raises(ConfigInvalid, match="not empty"):
        database.load(tmp_path / "copy", empty_postgres, quiet)
    wipe(empty_postgres)
    database.load(tmp_path / "copy", empty_postgres, quiet)
    with database.opened(empty_postgres) as connection:
        assert rows == [[], described(connection)]
        assert store.rebuild(connection, locked=False) == []
        assert store.size(connection) > 10
        blame = "INSERT INTO blames (accuser, accused, chunk, got, recorded_ms) VALUES ('a', 'b', 'c', 'd', 1)"
        connection.exec_driver_sql(blame)


def test_a_copy_is_of_one_moment_while_others_write(tmp_path: Path) -> None:
    world = World(tmp_path, rules=AuditSection())
    world.publish(1, 0)
    node = world.join(1)
    sizes = list[int]()

    def write(_what: str, _done: int, _total: int) -> None:
        """Write between two pieces of the copy."""
        if len(sizes) < 3:
            world.earn(node)
            sizes.append(world.run(store.size))

    before = world.run(store.size)
    database.save(
        tmp_path / "state.db",
        tmp_path / "copy",
        lambda *said: write(*said) if len(sizes) < 3 else None,
        pages_at_once=1,
    )
    world.database.close()
    assert sizes[-1] > before
    with closing(Database(tmp_path / "copy" / "state.db")) as copied:
        assert copied.run_now(store.size) == before
        assert copied.run_now(store.rebuild) == []


def test_a_version_that_is_published_while_the_store_is_copied_is_none_of_the_backup(tmp_path: Path) -> None:
    """Data that the publication deletes is already held: an old version's chunks, the newest one's upload."""
    settings = tmp_path / "round.toml"
    settings.write_text("")
    published = [1]

    async def make() -> Config:
        async with serve(tmp_path, "staleness.max_updates=0") as served:
            await served.publish()
            loop = asyncio.get_running_loop()

            def tell(what: str, _done: int, _total: int) -> None:
                if what == "store":
                    published.append(published[-1] + 1)
                    weights = b"weights of version %d" % published[-1]
                    asyncio.run_coroutine_threadsafe(served.publish(published[-1], weights), loop).result(30)

            await asyncio.to_thread(
                making.make, served.round.config, settings, tmp_path / "b", passphrase=PASSPHRASE, tell=tell
            )
            return served.round.config

    config = asyncio.run(make())
    assert len(published) > 1
    config.round.directory.rename(tmp_path / "gone")
    restore(tmp_path / "b", tmp_path / "new")
    assert_the_newest_version_is_whole(tmp_path / "new", 1)
