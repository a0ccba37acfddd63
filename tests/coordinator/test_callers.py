"""Callers that take more than their share: connections, streams, and answers that they never read."""

import asyncio
from asyncio import StreamReader, StreamWriter
from contextlib import suppress
from pathlib import Path

import pytest

from coordinator.api import callers, http
from tests.coordinator.served import Served, serve

pytestmark = pytest.mark.asyncio

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
LARGE = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who calls from this machine is nobody special, and looked at often."""
    monkeypatch.setattr(callers, "OWN", ())
    monkeypatch.setattr(callers, "LOOK_S", 0.02)


async def connect(served: Served) -> tuple[StreamReader, StreamWriter]:
    assert served.client.port is not None
    return await asyncio.open_connection(served.client.host, served.client.port)


async def is_answered(reader: StreamReader, writer: StreamWriter) -> bool:
    writer.write(HEALTH)
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    await reader.readexactly(int(head.partition("content-length:")[2].partition("\r\n")[0]))
    return " 200 " in head


async def is_cut(reader: StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


@pytest.mark.usefixtures("strangers")
async def test_the_newest_connections_of_a_crowded_address_are_closed(tmp_path: Path) -> None:
    async with serve(tmp_path, "round.connections_per_address=3") as served, asyncio.timeout(120):
        lines = [await connect(served) for _ in range(5)]
        assert [await is_cut(reader) for reader, _ in lines[3:]] == [True, True]
        assert [await is_answered(*line) for line in lines[:3]] == [True] * 3
        for _, writer in lines:
            writer.close()


async def test_a_proxy_on_this_machine_may_have_as_many_as_it_likes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers, "LOOK_S", 0.02)
    async with serve(tmp_path, "round.connections_per_address=1") as served, asyncio.timeout(120):
        lines = [await connect(served) for _ in range(4)]
        several_looks_s = asyncio.get_running_loop().time() + 10 * callers.LOOK_S
        while asyncio.get_running_loop().time() < several_looks_s:
            assert [await is_answered(*line) for line in lines] == [True] * 4
        for _, writer in lines:
            writer.close()


@pytest.mark.usefixtures("strangers")
@pytest.mark.parametrize("bound", ["time", "memory"])
async def test_answers_that_nobody_reads_are_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(http, "GRACE_S", 0.5 if bound == "time" else 3600.0)
    monkeypatch.setattr(http, "RATE_BYTES_PER_S", 2**30)
    monkeypatch.setattr(callers, "UNREAD_MAX_BYTES", 0 if bound == "memory" else 2**40)
    async with serve(tmp_path) as served, asyncio.timeout(300):
        _, writer = await connect(served)
        while not waiting(served) and not writer.is_closing():  # it may be cut before it was seen to wait
            writer.write(50 * LARGE)
            await asyncio.sleep(0)
        while waiting(served):
            assert (await served.client.get("/healthz")).status == 200
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.usefixtures("strangers")
async def test_one_address_has_its_share_of_listeners(tmp_path: Path) -> None:
    async with serve(tmp_path, "round.listeners_per_address=2") as served, asyncio.timeout(120):
        await served.publish()
        streams = [await served.client.get("/v1/events") for _ in range(2)]
        assert [stream.status for stream in streams] == [200, 200]
        assert (await served.client.get("/v1/events")).status == 503
        streams.pop().close()
        while (await served.client.get("/v1/events")).status == 503:
            pass
        streams.pop().close()


def waiting(served: Served) -> int:
    """Bytes that the server keeps for those who do not read them."""
    runner = served.client.server.runner
    assert runner is not None
    assert runner.server is not None
    found = [one.transport.get_write_buffer_size() for one in runner.server.connections if one.transport is not None]
    return sum(found)
