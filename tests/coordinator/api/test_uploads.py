"""The learner's uploads: on the disk as they come, under their name only when whole, and nothing left of the others."""

import asyncio
import os
import threading
import tracemalloc
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from random import Random

import pytest
import pytest_asyncio
from aiohttp import ClientResponse

from coordinator.api import http
from coordinator.base.files import ArrivingFile
from protocol import limits
from protocol.policy import chunks
from protocol.wire import canonical
from protocol.work.learning import KnownUploads, Publication, UploadedFile
from tests.coordinator.served import Served, serve

pytestmark = pytest.mark.asyncio

FILE = "model.safetensors"
DATA = Random(1).randbytes(300_000)
"""More than the tiny disk holds."""


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serve(tmp_path) as here:
        yield here


async def put(served: Served, data: bytes, *, digest: str | None = None) -> ClientResponse:
    address = f"/v1/learner/uploads/1/{FILE}?digest={chunks.digest(data) if digest is None else digest}"
    return await served.client.put(address, data=BytesIO(data), headers=served.operator)


async def refused_as(response: ClientResponse) -> str:
    code = canonical.decode(await response.read())["code"]
    assert isinstance(code, str)
    return code


def stored(served: Served) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (served.round.publisher.uploads / "1").iterdir()}


async def test_an_upload_of_another_digest_is_refused_and_the_one_before_it_stays(served: Served) -> None:
    assert (await put(served, b"whole")).status == 204
    for digest in (chunks.digest(b"whole"), "", "0" * 64):
        assert await refused_as(await put(served, b"other", digest=digest)) == "manifest_invalid"
    assert stored(served) == {FILE: b"whole"}
    assert (await put(served, b"other")).status == 204
    assert stored(served) == {FILE: b"other"}


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("farewell", ["close", "abort"])
async def test_a_client_that_goes_away_in_mid_upload_leaves_nothing(
    served: Served, framing: str, farewell: str
) -> None:
    half = bytes(3 * limits.MIB)
    length = f"Content-Length: {2 * len(half)}" if framing == "length" else "Transfer-Encoding: chunked"
    body = half if framing == "length" else b"%x\r\n%b\r\n" % (len(half), half)
    folder = served.round.publisher.uploads / "1"

    def arrived() -> int:
        return sum(path.stat().st_size for path in folder.glob("*"))

    url = served.client.make_url(f"/v1/learner/uploads/1/{FILE}?digest={chunks.digest(2 * half)}")
    assert url.host
    _, writer = await asyncio.open_connection(url.host, url.port)
    head = f"PUT {url.raw_path_qs} HTTP/1.1\r\nHost: x\r\nAuthorization: {served.operator['Authorization']}\r\n{length}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    async with asyncio.timeout(30):
        while arrived() < 2 * limits.MIB:  # noqa: ASYNC110  # a folder tells nobody that it fills
            await asyncio.sleep(0.001)
        if farewell == "abort":
            writer.transport.abort()
        else:
            writer.write_eof()
        while arrived():  # noqa: ASYNC110  # nor that it empties
            await asyncio.sleep(0.001)
    writer.close()
    assert (await put(served, b"whole")).status == 204
    assert stored(served) == {FILE: b"whole"}


async def test_a_client_that_goes_away_before_its_file_is_made_leaves_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go, made = threading.Event(), threading.Event(), list[ArrivingFile]()

    def slowly(path: Path) -> ArrivingFile:
        begun.set()
        go.wait()
        made.append(ArrivingFile(path))
        return made[0]

    monkeypatch.setattr(http, "ArrivingFile", slowly)  # the real file, made after the client has gone
    async with asyncio.timeout(30):
        asking = asyncio.ensure_future(put(served, b"whole"))
        await asyncio.to_thread(begun.wait)
        asking.cancel()
        await asyncio.wait([asking])
        await served.client.get("/healthz")  # the server has seen that it is gone
        go.set()
        folder = served.round.publisher.uploads / "1"
        while not made or any(folder.iterdir()):  # noqa: ASYNC110  # a folder tells nobody that it empties
            await asyncio.sleep(0.001)


async def test_an_upload_is_never_held_in_memory_as_a_whole(served: Served) -> None:
    size, piece = 64 * limits.MIB, bytes(limits.MIB)

    async def flow() -> AsyncIterator[bytes]:
        for _ in range(size // len(piece)):
            yield piece

    address = f"/v1/learner/uploads/1/{FILE}?digest={chunks.digest(bytes(size))}"
    tracemalloc.start()
    response = await served.client.put(address, data=flow(), headers=served.operator)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert response.status == 204
    assert (served.round.publisher.uploads / "1" / FILE).stat().st_size == size
    assert peak < 16 * limits.MIB


async def test_an_upload_that_fills_the_disk_is_named_and_leaves_the_room_to_others(
    tmp_path: Path, tiny_disk: Path
) -> None:
    (tmp_path / "round").mkdir()
    (tmp_path / "round" / "uploads").symlink_to(tiny_disk)
    async with serve(tmp_path) as served:
        assert await refused_as(await put(served, DATA)) == "disk_full"
        assert stored(served) == {}
        assert (await put(served, DATA[:200_000])).status == 204


async def test_a_version_that_fills_the_disk_is_named_and_published_when_there_is_room(
    tmp_path: Path, tiny_disk: Path
) -> None:
    """The chunks do not fit beside those of earlier versions."""
    (tmp_path / "round").mkdir()
    (tmp_path / "round" / "blobs").symlink_to(tiny_disk)
    async with serve(tmp_path) as served:
        await put(served, DATA)
        message = Publication(version=1, update=0, files=(UploadedFile(path=FILE, digest=chunks.digest(DATA)),))
        call = "/v1/learner/versions"
        response = await served.client.post(call, data=message.to_bytes(), headers=served.operator)
        assert await refused_as(response) == "disk_full"
        assert not served.round.publisher.read_chunk(chunks.chunk_id(DATA[:1024]))
        assert os.listdir(tiny_disk) == []  # noqa: PTH208  # a look that an event loop can afford
        assert served.round.publisher.manifest(1) is None
        (tmp_path / "round" / "blobs").unlink()
        response = await served.client.post(call, data=message.to_bytes(), headers=served.operator)
        assert response.status == 204
        assert served.round.publisher.read_file(1, FILE) == DATA


async def test_what_the_coordinator_has_from_before_need_not_be_sent_again(served: Served) -> None:
    for name, data in {FILE: DATA[:1000], "config.json": b"{}"}.items():
        address = f"/v1/learner/uploads/1/{name}?digest={chunks.digest(data)}"
        assert (await served.client.put(address, data=BytesIO(data), headers=served.operator)).status == 204
    files = tuple(UploadedFile(path=name, digest=chunks.digest(data)) for name, data in stored(served).items())
    for version in (1, 2):
        body = Publication(version=version, update=version, files=files).to_bytes()
        held = await served.client.get(f"/v1/learner/uploads/{version}", headers=served.operator)
        told = KnownUploads.from_bytes(await held.read()).files
        assert set(told) == (set(files) if version == 2 else set())
        assert (await served.client.post("/v1/learner/versions", data=body, headers=served.operator)).status == 204
    assert (await served.client.get("/v1/learner/uploads/2")).status == 401
