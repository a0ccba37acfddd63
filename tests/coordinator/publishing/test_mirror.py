"""The public files, and their copy in a real object store that checks every signature."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from aiohttp import web
from tuf.api.metadata import Metadata, Snapshot, Targets, Timestamp

from coordinator.publishing.mirror import FRESH, IMMUTABLE, Mirror, Target, make_public, target
from coordinator.publishing.signed_metadata import utc_now
from protocol.policy.manifest import PolicyManifest, target_path
from tests.coordinator.object_store import BUCKET, Store, object_store
from tests.coordinator.publishing.test_publish import Press
from tests.coordinator.served import serve

pytestmark = pytest.mark.asyncio


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with object_store() as made:
        yield made


def place(store: Store, prefix: str) -> Target:
    return target(f"s3://{BUCKET}/{prefix}", store.environment)


def under(objects: dict[str, bytes], prefix: str) -> dict[str, bytes]:
    start = f"{prefix}/"
    return {name.removeprefix(start): data for name, data in objects.items() if name.startswith(start)}


def public_files(folder: Path) -> dict[str, bytes]:
    public = folder / "public"
    paths = [path for start in public.iterdir() for path in start.rglob("*") if path.is_file()]
    return {path.relative_to(public).as_posix(): path.read_bytes() for path in paths}


def newest_of(folder: Path) -> dict[str, bytes]:
    """The public files without the documents that newer ones have replaced."""
    files = public_files(folder)
    for kind in ("targets", "snapshot"):
        numbers = [int(name.split("/")[1].split(".")[0]) for name in files if name.endswith(f".{kind}.json")]
        for number in sorted(numbers)[:-1]:
            del files[f"metadata/{number}.{kind}.json"]
    return files


@asynccontextmanager
async def running(mirror: Mirror) -> AsyncIterator[Mirror]:
    task = asyncio.create_task(mirror.run())
    try:
        async with asyncio.timeout(120):
            yield mirror
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def press_of(folder: Path) -> Press:
    press = Press(folder, utc_now())
    make_public(folder)
    return press


async def test_the_store_holds_what_the_folder_holds(tmp_path: Path, store: Store) -> None:
    press = press_of(tmp_path)
    press.publish(1, {"model.model": bytes(3000), "config.json": b"{}"})
    async with running(Mirror(tmp_path / "public", place(store, "whole"), tmp_path / "m")) as mirror:
        assert await mirror.caught_up(60)
    there = under(store.objects(), "whole")
    assert there == newest_of(tmp_path)
    assert {name.partition("/")[0] for name in there} == {"chunks", "metadata"}
    assert store.caching("whole/metadata/timestamp.json") == FRESH
    assert store.caching("whole/metadata/1.root.json") == IMMUTABLE


async def test_no_key_token_or_upload_gets_into_the_public_folder(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        await served.publish()
        files = public_files(served.round.folder)
    assert files
    for data in files.values():
        assert b"PRIVATE" not in data
        assert served.round.operator_token.encode() not in data
    assert {name.partition("/")[0] for name in files} == {"chunks", "metadata"}


async def test_only_what_is_new_is_uploaded_and_what_nobody_needs_deleted(tmp_path: Path, store: Store) -> None:
    press = press_of(tmp_path)
    memory = tmp_path / "m"
    async with running(Mirror(tmp_path / "public", place(store, "diff"), memory)) as mirror:
        for version in (1, 2, 3, 4):
            press.publish(version, {"f.model": b"%d" % version, "g.model": b"same"})
            press.publisher.forget_old(version)
            assert await mirror.caught_up(60)
    there, here = under(store.objects(), "diff"), public_files(tmp_path)
    assert {name for name in there if name.startswith("chunks/")} == {
        name for name in here if name.startswith("chunks/")
    }
    assert there.items() >= newest_of(tmp_path).items()
    remembered = json.loads(memory.read_bytes())
    assert "metadata/1.root.json" in remembered["names"]
    assert store.secret not in memory.read_text()


async def test_a_restart_uploads_nothing_twice(tmp_path: Path, store: Store) -> None:
    press = press_of(tmp_path)
    press.publish(1, {"f.model": b"1"})
    for _ in range(2):
        async with running(Mirror(tmp_path / "public", place(store, "again"), tmp_path / "m")) as mirror:
            assert await mirror.caught_up(60)
    (tmp_path / "public/chunks").resolve().rename(tmp_path / "hidden")
    (tmp_path / "blobs").mkdir()
    # The memory names chunks that the folder lacks: were they read again, they would be missed.
    async with running(Mirror(tmp_path / "public", place(store, "again"), tmp_path / "m")) as mirror:
        assert await mirror.caught_up(60)
    assert not [name for name in under(store.objects(), "again") if name.startswith("chunks")]


async def test_a_memory_of_another_place_counts_for_nothing(tmp_path: Path, store: Store) -> None:
    press = press_of(tmp_path)
    press.publish(1, {"f.model": b"1"})
    for prefix in ("here", "there"):
        async with running(Mirror(tmp_path / "public", place(store, prefix), tmp_path / "m")) as mirror:
            assert await mirror.caught_up(60)
    assert under(store.objects(), "there") == newest_of(tmp_path)


class Log:
    """A store that only writes down what it is sent, and fails when it should."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.missing: list[str] = []
        """Files that a reader would have missed, after each request."""
        self.failing = 0

    async def handle(self, request: web.Request) -> web.Response:
        name = request.path.removeprefix("/bucket/")
        data = await request.read()
        if self.failing:
            self.failing -= 1
            return web.Response(status=503, text="SlowDown")
        self.objects[name] = data
        try:
            for path in self.newest_targets():
                manifest = PolicyManifest.from_bytes(self.objects[f"metadata/{path}"])
                self.missing += [c for c in manifest.chunk_sizes() if f"chunks/{c[:2]}/{c}" not in self.objects]
        except KeyError as error:
            self.missing.append(str(error))
        return web.Response()

    def newest_targets(self) -> list[str]:
        """Return the targets that a reader finds from the timestamp."""
        data = self.objects.get("metadata/timestamp.json")
        if data is None:
            return []
        snapshot_meta = Metadata[Timestamp].from_bytes(data).signed.snapshot_meta
        snapshot = self.objects[f"metadata/{snapshot_meta.version}.snapshot.json"]
        targets_meta = Metadata[Snapshot].from_bytes(snapshot).signed.meta["targets.json"]
        targets = self.objects[f"metadata/{targets_meta.version}.targets.json"]
        return list(Metadata[Targets].from_bytes(targets).signed.targets)


@asynccontextmanager
async def logging_store() -> AsyncIterator[tuple[Log, Target]]:
    log = Log()
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", log.handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        await web.SockSite(runner, listener).start()
        port = listener.getsockname()[1]
        environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
        }  # fmt: skip
        yield log, target("s3://bucket", environment)
        await runner.cleanup()


async def test_a_reader_never_sees_metadata_whose_files_are_missing(tmp_path: Path) -> None:
    """All files that the newest timestamp leads to exist after every single request."""
    press = press_of(tmp_path)
    async with logging_store() as (log, where), running(Mirror(tmp_path / "public", where, tmp_path / "m")) as mirror:
        for version in (1, 2, 3):
            press.publish(version, {"f.model": b"%d" % version})
            assert await mirror.caught_up(60)
            assert target_path(version) in log.newest_targets()
            assert not log.missing


async def test_a_store_that_refuses_is_tried_again(tmp_path: Path) -> None:
    press = press_of(tmp_path)
    press.publish(1, {"f.model": b"1"})
    async with logging_store() as (log, where):
        log.failing = 7
        async with running(Mirror(tmp_path / "public", where, tmp_path / "m", pauses_s=(0.01,))) as mirror:
            assert await mirror.caught_up(60)
        assert log.objects == newest_of(tmp_path)


async def test_a_dead_store_delays_a_version_only_so_long(tmp_path: Path) -> None:
    press = press_of(tmp_path)
    press.publish(1, {"f.model": b"1"})
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{nobody.getsockname()[1]}",
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
        }
        where = target("s3://bucket", environment)
        async with running(Mirror(tmp_path / "public", where, tmp_path / "m")) as mirror:
            assert not await mirror.caught_up(0.2)


async def test_a_store_that_is_known_to_be_down_delays_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The patience would outlast the test; the second version does not wait for it."""
    press = press_of(tmp_path)
    press.publish(1, {"f.model": b"1"})
    async with logging_store() as (log, where):
        log.failing = 10**6
        async with running(Mirror(tmp_path / "public", where, tmp_path / "m")) as mirror:
            assert not await mirror.caught_up(0)
            while "upload failed" not in caplog.text:  # noqa: ASYNC110  # a log line wakes nobody
                await asyncio.sleep(0.05)
            assert not await mirror.caught_up(10**6)


async def test_a_document_that_nobody_saw_yet_is_not_uploaded(tmp_path: Path) -> None:
    """A crash left it; the next publication signs other content under its name."""
    press = press_of(tmp_path)
    press.publish(1, {"f.model": b"1"})
    unseen = tmp_path / "metadata" / "3.targets.json"
    unseen.write_bytes(b"never seen")
    async with logging_store() as (log, where), running(Mirror(tmp_path / "public", where, tmp_path / "m")) as mirror:
        assert await mirror.caught_up(60)
        assert "metadata/3.targets.json" not in log.objects
        press.publish(2, {"f.model": b"2"})
        assert await mirror.caught_up(60)
        assert log.objects["metadata/3.targets.json"] == unseen.read_bytes() != b"never seen"


async def test_wrong_credentials_are_told_and_nothing_is_written(
    tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    press = press_of(tmp_path)
    press.publish(1, {"f.model": b"1"})
    where = target(f"s3://{BUCKET}/stolen", store.environment | {"AWS_SECRET_ACCESS_KEY": "wrong"})
    async with running(Mirror(tmp_path / "public", where, tmp_path / "m")) as mirror:
        assert not await mirror.caught_up(1)
        while "upload failed" not in caplog.text:  # noqa: ASYNC110  # a log line wakes nobody
            await asyncio.sleep(0.05)
    assert "status 403" in caplog.text
    assert "wrong" not in caplog.text
    assert not under(store.objects(), "stolen")


async def test_a_version_is_uploaded_before_it_is_announced(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    async with serve(tmp_path, f"publish.upload=s3://{BUCKET}/round") as served:
        mirror = served.round.publication.mirror
        assert mirror
        async with running(mirror):
            await served.publish()
            assert under(store.objects(), "round").items() >= newest_of(served.round.folder).items()
            await served.round.publication.renew_timestamp()
            assert await mirror.caught_up(60)
            assert under(store.objects(), "round").items() >= newest_of(served.round.folder).items()
