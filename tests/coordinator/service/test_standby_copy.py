"""A standby copy while everything around it fails: half passes, full disks, restarts on both sides, a target away."""

import asyncio
import json
import shutil
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from random import Random

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from coordinator.base.clock import now_ms
from coordinator.cli import app
from coordinator.reports import standby
from coordinator.reports.standby import PATIENCE_S, Confirmed
from coordinator.service.backup import restoring
from coordinator.service.backup.archive import BackupInvalid, Sealer
from coordinator.service.backup.following import Follower
from coordinator.service.backup.making import newest_document
from coordinator.service.backup.store_copy import StoreCopy, assemble
from ledger import store
from ledger.entry import Deposit
from protocol.errors import ConfigInvalid, DiskFull
from tests.coordinator.served import Served, serve
from tests.processes.programs import until

PASSPHRASE = "correct horse"


def quiet(_what: str, _done: int, _total: int) -> None:
    """Ignore progress."""


def follower(served: Served, target: Path) -> Follower:
    settings = served.round.folder.parent / "round.toml"
    settings.write_text("")
    return Follower(served.round.config, settings, target, Sealer(PASSPHRASE), quiet)


def restored(target: Path, folder: Path) -> dict[str, int]:
    """Restore the copy as a round; return its numbers of entries and rollouts."""
    made = restoring.restore(
        target, folder, store_url="", passphrase=PASSPHRASE, seen=(), nothing_newer=True, tell=quiet
    )
    with closing(sqlite3.connect(folder / "state.db")) as there:
        (rollouts,) = there.execute("SELECT count(*) FROM rollouts").fetchone()
    return {"entries": made.ledger_size, "rollouts": rollouts, "version": made.version}


async def work(served: Served, number: int) -> None:
    node = await served.join(number)
    (lease,) = await served.lease(node)
    (verdict,) = await served.submit(node, served.answer(node, lease))
    assert verdict.outcome == "accepted"


def deposit(connection: sa.Connection, number: int) -> None:
    store.append(connection, Deposit(reference=f"extra-{number}", amount_micros=1), 1)


async def publish(served: Served, following: Follower, version: int) -> None:
    """Publish in a followed round, which waits for the next pass."""
    publishing = asyncio.create_task(served.publish(version, b"weights %d" % version))
    while not publishing.done():
        await asyncio.to_thread(following.step)
    await publishing


@pytest.mark.asyncio
async def test_copy_is_that_of_the_last_pass_that_ended_whatever_a_killed_one_left(tmp_path: Path) -> None:
    target, half = tmp_path / "standby", tmp_path / "half"
    async with serve(tmp_path) as served:
        await served.publish()
        await work(served, 1)
        with follower(served, target) as following:
            await asyncio.to_thread(following.step)
            entries = await served.round.database.read(store.size)
            shutil.copytree(target, half)
            await work(served, 2)
            await publish(served, following, 2)
    for path in (path for path in target.rglob("*") if path.is_file() and path.name != "backup.json"):
        (half / path.relative_to(target)).parent.mkdir(exist_ok=True)
        shutil.copy(path, half / path.relative_to(target))  # all that the second pass wrote before its list
    (half / "files" / ".draft").write_bytes(b"half a file")
    assert restored(half, tmp_path / "new") == {"entries": entries, "rollouts": 1, "version": 1}
    assert restored(target, tmp_path / "newer")["rollouts"] == 2
    assert newest_document(tmp_path / "newer") == 2, "signed, and entered by the next launch"


@pytest.mark.asyncio
async def test_restore_says_what_the_copy_has_and_how_to_go_on(tmp_path: Path) -> None:
    target, new, passphrase = tmp_path / "standby", tmp_path / "new", tmp_path / "passphrase"
    passphrase.write_text(PASSPHRASE)
    async with serve(tmp_path) as served:
        await served.publish()
        with follower(served, target) as following:
            await asyncio.to_thread(following.step)
        entries = await served.round.database.read(store.size)
    said = ["restore", str(target), str(new), "--passphrase-file", str(passphrase)]
    assert "second history" in str(CliRunner().invoke(app, said).exception)
    assert "needs --take-over" in str(CliRunner().invoke(app, [*said, "--after-gap", "--nothing-newer"]).exception)
    done = CliRunner().invoke(app, [*said, "--take-over", "--nothing-newer"])
    assert done.exit_code == 0, done.output
    assert f"version 1, {entries} entries of the ledger" in done.output
    assert f"swarm-coordinator launch {new / 'operator.toml'}" in done.output


@pytest.mark.asyncio
async def test_follower_that_is_started_again_goes_on_in_the_same_log(tmp_path: Path) -> None:
    target = tmp_path / "standby"
    async with serve(tmp_path) as served:
        await served.publish()
        with closing(sqlite3.connect(served.round.folder / "state.db")) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM rollouts").fetchone()  # keeps the log from beginning anew meanwhile
            for number in (1, 2, 3):
                await work(served, number)
                with follower(served, target) as following:
                    await asyncio.to_thread(following.step)
                assert [path.name for path in (target / "store").glob("*.db")] == ["000001.db"]
        entries = await served.round.database.read(store.size)
    assert restored(target, tmp_path / "new") == {"entries": entries, "rollouts": 3, "version": 1}


@pytest.mark.asyncio
async def test_log_that_began_anew_while_nobody_followed_begins_a_new_generation(tmp_path: Path) -> None:
    target, entries = tmp_path / "standby", 0
    for number in (1, 2):
        async with serve(tmp_path) as served:  # at whose end SQLite deletes the log
            if number == 1:
                await served.publish()
            await work(served, number)
            with follower(served, target) as following:
                await asyncio.to_thread(following.step)
            entries = await served.round.database.read(store.size)
        assert [path.name for path in (target / "store").glob("*.db")] == [f"00000{number}.db"]
    assert restored(target, tmp_path / "new")["entries"] == entries


@pytest.fixture
def small_disk(tiny_disk: Path) -> Path:
    """Return a disk of 16 MiB."""
    subprocess.run(["mount", "-o", "remount,size=16m", tiny_disk], check=True)
    return tiny_disk


@pytest.mark.asyncio
async def test_full_target_is_reported_and_stops_nothing_and_goes_on_when_there_is_room(
    tmp_path: Path, small_disk: Path
) -> None:
    async with serve(tmp_path) as served:
        await served.publish()
        with follower(served, small_disk / "standby") as following:
            await asyncio.to_thread(following.step)
            ballast = small_disk / "ballast"
            ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free))
            await work(served, 1)
            with pytest.raises(DiskFull) as full:
                await asyncio.to_thread(following.step)
            following.failed(full.value)
            known = standby.read(served.round.folder)
            assert known is not None
            assert "no disk space left" in known.problem
            await work(served, 2)
            ballast.unlink()
            await asyncio.to_thread(following.step)
        entries = await served.round.database.read(store.size)
    assert restored(small_disk / "standby", tmp_path / "new") == {"entries": entries, "rollouts": 2, "version": 1}


@pytest.mark.asyncio
async def test_round_whose_disk_is_full_is_copied_to_another_disk(tmp_path: Path, small_disk: Path) -> None:
    target = tmp_path / "standby"
    async with serve(small_disk) as served:
        await served.publish()
        await work(served, 1)
        entries = await served.round.database.read(store.size)
        with follower(served, target) as following:
            with suppress(OSError), (small_disk / "ballast").open("wb") as ballast:
                while True:
                    ballast.write(bytes(4096))
            assert shutil.disk_usage(small_disk).free == 0
            await asyncio.to_thread(following.step)
            assert standby.read(served.round.folder) is None, "the round does not wait for a copy that it cannot know"
            (small_disk / "ballast").unlink()
            await asyncio.to_thread(following.step)
            assert standby.read(served.round.folder) is not None
        assert not list((target / "files").glob(".*"))
    assert restored(target, tmp_path / "new") == {"entries": entries, "rollouts": 1, "version": 1}


@pytest.mark.asyncio
async def test_target_that_is_away_is_not_begun_anew_below_its_mount_point(tmp_path: Path) -> None:
    target, mounted = tmp_path / "standby", tmp_path / "elsewhere"
    async with serve(tmp_path) as served:
        await served.publish()
        with follower(served, target) as following:
            await asyncio.to_thread(following.step)
            target.rename(mounted)
            target.mkdir()
            with pytest.raises(ConfigInvalid, match="is missing"):
                await asyncio.to_thread(following.step)
            assert not list(target.iterdir())
            target.rmdir()
            mounted.rename(target)
            await work(served, 1)
            await asyncio.to_thread(following.step)
    assert restored(target, tmp_path / "new")["rollouts"] == 1


@pytest.mark.asyncio
async def test_target_that_is_no_copy_of_this_round_is_left_alone(tmp_path: Path) -> None:
    other, target = tmp_path / "other", tmp_path / "standby"
    other.mkdir()
    async with serve(tmp_path) as served, serve(other) as second:
        with follower(served, target) as following:
            await asyncio.to_thread(following.step)
            with (
                pytest.raises(ConfigInvalid, match="is already running for this round"),
                follower(served, tmp_path / "third"),
            ):
                pass
        with follower(second, target) as following, pytest.raises(ConfigInvalid, match="another round"):
            await asyncio.to_thread(following.step)
        full = tmp_path / "full"
        (full / "mine").mkdir(parents=True)
        with follower(served, full) as following, pytest.raises(ConfigInvalid, match="not empty"):
            await asyncio.to_thread(following.step)
        with pytest.raises(ConfigInvalid, match="own folder"), follower(served, served.round.folder / "standby"):
            pass


@pytest.mark.asyncio
async def test_no_checkpoint_covers_what_a_copy_lacks_until_the_copy_is_given_up(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        here = served.round
        await here.publish_checkpoint()
        size = await here.database.read(store.size)
        copy = Confirmed(target="t", taken_ms=now_ms(), ledger_size=size + 1, version=0, lag_max_s=0.0)
        for number in range(3):
            await here.database.run(deposit, number)
        standby.write(here.folder, copy)
        assert published(await here.publish_checkpoint()) == size + 1
        standby.write(here.folder, copy.model_copy(update={"ledger_size": size}))
        assert published(await here.publish_checkpoint()) == size + 1, "what is signed stays signed"
        late_ms = now_ms() - int(1000 * PATIENCE_S) - 1000
        standby.write(here.folder, copy.model_copy(update={"taken_ms": late_ms}))
        assert published(await here.publish_checkpoint()) == size + 3
        await here.database.run(deposit, 3)
        standby.write(here.folder, copy.model_copy(update={"taken_ms": now_ms() + 3_600_000}))
        assert published(await here.publish_checkpoint()) == size + 4, "the clock was set back, and nobody follows"


def published(note: bytes) -> int:
    return int(note.splitlines()[1])


@pytest.mark.asyncio
async def test_work_is_given_for_a_version_once_the_copy_has_it(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        here = served.round

        def confirm(version: int) -> bool:
            copy = Confirmed(target="t", taken_ms=now_ms(), ledger_size=None, version=version, lag_max_s=0.0)
            standby.write(here.folder, copy)
            return True

        confirm(0)
        publishing = asyncio.create_task(served.publish())
        is_signed = lambda: confirm(0) and len(here.metadata.targets()) == 1  # noqa: E731  # said once
        await asyncio.to_thread(until, "the signed version", is_signed)
        assert here.news.version == 0
        confirm(1)
        await publishing
        assert here.news.version == 1


@pytest.mark.asyncio
async def test_file_of_the_copy_that_somebody_changed_is_found(tmp_path: Path) -> None:
    target = tmp_path / "standby"
    async with serve(tmp_path) as served:
        await served.publish()
        with follower(served, target) as following:
            await asyncio.to_thread(following.step)
    secrets = [path.read_bytes() for path in (tmp_path / "round" / "keys").iterdir()]
    everything = b"".join(path.read_bytes() for path in target.rglob("*") if path.is_file())
    assert not any(secret in everything for secret in secrets)
    for kind in ("store/*.db", "store/*.wal", "files/*/*"):
        path = next(path for path in sorted(target.glob(kind)) if path.stat().st_size > 40)
        data = path.read_bytes()
        path.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])
        with pytest.raises(BackupInvalid):
            restored(target, tmp_path / "new")
        path.write_bytes(data)
    listed = json.loads((target / "backup.json").read_text())
    listed["version"] = 7
    (target / "backup.json").write_text(json.dumps(listed))
    with pytest.raises(BackupInvalid, match="was changed"):
        restored(target, tmp_path / "new")


@pytest.fixture
def busy_store(tmp_path: Path) -> Iterator[Path]:
    """A store that two threads write to, and a third reads now and then."""
    path, enough = tmp_path / "busy.db", threading.Event()
    with closing(sqlite3.connect(path)) as made:
        made.execute("PRAGMA journal_mode=WAL")
        made.execute("CREATE TABLE seen (number INTEGER PRIMARY KEY, filler BLOB)")

    def write(seed: int) -> None:
        chance = Random(seed)
        with closing(sqlite3.connect(path, isolation_level=None, timeout=30)) as mine:
            mine.execute("PRAGMA wal_autocheckpoint=50")
            while not enough.is_set():
                enough.wait(0.002)
                mine.execute("INSERT INTO seen (filler) VALUES (?)", (chance.randbytes(chance.randint(1, 9000)),))
                if chance.random() < 0.05:
                    mine.execute("BEGIN IMMEDIATE")
                    mine.execute("UPDATE seen SET filler = zeroblob(5000) WHERE number % 7 = 0")
                    mine.execute("ROLLBACK")

    def read() -> None:
        with closing(sqlite3.connect(path, isolation_level=None, timeout=30)) as mine:
            while not enough.is_set():
                mine.execute("BEGIN")
                mine.execute("SELECT count(*) FROM seen").fetchone()
                mine.execute("COMMIT")
                enough.wait(0.002)

    threads = [threading.Thread(target=write, args=(seed,)) for seed in (1, 2)] + [threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    yield path
    enough.set()
    for thread in threads:
        thread.join()


def test_every_pass_has_all_that_was_committed_before_it_over_many_logs(busy_store: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    target.mkdir()
    copy = StoreCopy(busy_store, target, {}, turn_bytes=100_000)
    with closing(sqlite3.connect(busy_store, timeout=30)) as live:

        def one_pass() -> list[str]:
            (rows,) = live.execute("SELECT count(*) FROM seen").fetchone()
            copy.pull(quiet)
            names = [entry.name for entry in copy.push()]
            if len(places) < len(names):  # after each log that began anew
                places.append(tmp_path / f"again-{len(places)}")
                assert rows <= rows_in(target, names, places[-1])
            return names

        places = list[Path]()
        until("the log to begin anew five times", lambda: len(one_pass()) > 6)
    copy.close()
    assert len(list((target / "store").glob("*.db"))) == 1, "none of them was missed"


def rows_in(target: Path, names: list[str], place: Path) -> int:
    """Return the numbers of rows in the copy, after SQLite's integrity check."""
    place.mkdir()
    for name in names:
        shutil.copy(target / name, place)
    assemble(place, place / "state")
    with closing(sqlite3.connect(place / "state")) as there:
        assert there.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return int(there.execute("SELECT count(*) FROM seen").fetchone()[0])
