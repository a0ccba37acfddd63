"""Requests that are large, endless, packed or never ended: none costs more than its limit, or keeps others out."""

import asyncio
import gzip
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import ClientConnectionError

from coordinator.api.guard import Bounds
from protocol import limits
from tests.coordinator.api.test_http import MB, refused
from tests.coordinator.served import Served, serve

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serve(tmp_path) as here:
        yield here


"""A hundred megabytes, in every way to send them: refused by name, with flat memory, and the API stays up."""


async def stays_up_and_flat(served: Served, peak_bytes: int) -> None:
    assert (await served.client.get("/healthz")).status == 200
    assert peak_bytes < 4 * limits.REQUEST_MAX_BYTES


async def test_a_declared_length_is_refused_before_a_byte_is_sent(served: Served) -> None:
    assert served.client.port is not None
    reader, writer = await asyncio.open_connection(served.client.host, served.client.port)
    writer.write(b"POST /v1/nodes HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n")
    async with asyncio.timeout(5):
        assert b" 413 " in await reader.readline()
    writer.close()
    await writer.wait_closed()
    await stays_up_and_flat(served, 0)


async def test_an_endless_stream_is_cut_off(served: Served) -> None:
    sent = 0

    async def flood() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1600):
            sent += 2**16
            yield bytes(2**16)

    tracemalloc.start()
    # The answer may be lost when the connection is closed under a client that goes on sending.
    with suppress(ClientConnectionError):
        await refused(await served.client.post("/v1/nodes", data=flood()), "message_too_large")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sent < 50 * MB
    await stays_up_and_flat(served, peak)


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"POST /v1/owners HTTP/1.1\r\nHost:",
        b"POST /v1/owners HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf",
    ],
)
async def test_who_never_ends_a_request_holds_no_connection(tmp_path: Path, begun: bytes) -> None:
    (tmp_path / "other").mkdir()
    async with serve(tmp_path / "other", bounds=Bounds(idle_s=0.2, grace_s=0.2)) as served:
        assert served.client.port is not None
        reader, writer = await asyncio.open_connection(served.client.host, served.client.port)
        writer.write(begun)
        async with asyncio.timeout(60):
            await reader.read()  # to the end of the connection
        writer.close()
        await stays_up_and_flat(served, 0)


async def test_a_compressed_bomb_does_not_unfold(served: Served) -> None:
    bomb = gzip.compress(bytes(100 * MB), compresslevel=1)
    tracemalloc.start()
    response = await served.client.post("/v1/nodes", data=bomb, headers={"Content-Encoding": "gzip"})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    await refused(response, "message_too_large")
    await stays_up_and_flat(served, peak)


async def test_a_signed_request_just_below_the_limit_is_read(served: Served) -> None:
    await served.publish()
    key = await served.join()
    rollouts = tuple(bytes(limits.MESSAGE_MAX_BYTES // 2 - 1000) for _ in range(2))
    assert [verdict.code for verdict in await served.submit(key, *rollouts)] == ["malformed_message"] * 2
