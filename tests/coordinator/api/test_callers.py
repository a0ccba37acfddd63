"""Callers that take more than their share: connections, streams, and answers that they never read."""

import asyncio
from asyncio import StreamReader, StreamWriter
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientConnectionResetError, HttpVersion11, web

from coordinator.api import guard, http, watch
from coordinator.api.guard import Bounds
from tests.coordinator.served import Served, serve

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
LARGE = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"


OFTEN = Bounds(look_s=0.02)

STRANGERS = replace(OFTEN, proxies=())
"""Bounds under which callers from this machine are nobody special, and checked often."""


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


@pytest.mark.asyncio
async def test_the_newest_connections_of_a_crowded_address_are_closed(tmp_path: Path) -> None:
    async with serve(tmp_path, "round.connections_per_address=3", bounds=STRANGERS) as served, asyncio.timeout(120):
        lines = [await connect(served) for _ in range(5)]
        assert [await is_cut(reader) for reader, _ in lines[3:]] == [True, True]
        assert [await is_answered(*line) for line in lines[:3]] == [True] * 3
        for _, writer in lines:
            writer.close()


@pytest.mark.asyncio
async def test_a_proxy_on_this_machine_may_have_as_many_as_it_likes(tmp_path: Path) -> None:
    async with serve(tmp_path, "round.connections_per_address=1", bounds=OFTEN) as served, asyncio.timeout(120):
        lines = [await connect(served) for _ in range(4)]
        several_looks_s = asyncio.get_running_loop().time() + 10 * OFTEN.look_s
        while asyncio.get_running_loop().time() < several_looks_s:
            assert [await is_answered(*line) for line in lines] == [True] * 4
        for _, writer in lines:
            writer.close()


@pytest.mark.parametrize("begun", [b"", b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: "], ids=["silent", "slow head"])
@pytest.mark.asyncio
async def test_who_never_ends_its_first_head_is_cut_also_on_this_machine(tmp_path: Path, begun: bytes) -> None:
    bounds = replace(OFTEN, head_s=0.5, idle_s=3600.0)
    async with serve(tmp_path, bounds=bounds) as served:
        slow = [await connect(served) for _ in range(50)]
        honest = await connect(served)
        assert await is_answered(*honest)
        for _, writer in slow:
            writer.write(begun)
        assert all([await is_cut(reader) for reader, _ in slow])
        assert await is_answered(*honest)
        for _, writer in (*slow, honest):
            writer.close()


@pytest.mark.parametrize("begun", [b"G", b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: "], ids=["a byte", "slow head"])
@pytest.mark.parametrize("before", [1, 3])
@pytest.mark.asyncio
async def test_who_never_ends_a_later_head_is_cut_and_who_is_idle_stays(
    tmp_path: Path, before: int, begun: bytes
) -> None:
    bounds = replace(OFTEN, head_s=0.5, idle_s=3600.0)
    async with serve(tmp_path, bounds=bounds) as served:
        slow = [await connect(served) for _ in range(20)]
        idle = await connect(served)
        for line in (*slow * before, idle):
            assert await is_answered(*line)
        for _, writer in slow:
            writer.write(begun)
        assert all([await is_cut(reader) for reader, _ in slow])
        assert await is_answered(*idle)
        for _, writer in (*slow, idle):
            writer.close()


@pytest.mark.asyncio
async def test_a_head_that_drips_a_byte_at_a_time_gains_no_time(tmp_path: Path) -> None:
    async with serve(tmp_path, bounds=replace(OFTEN, head_s=0.5, idle_s=3600.0)) as served:
        reader, writer = await connect(served)
        assert await is_answered(reader, writer)
        cut = asyncio.ensure_future(is_cut(reader))
        writer.write(b"GET /healthz HTTP/1.1\r\nX-Slow: ")
        while not cut.done():
            writer.write(b"x")
            assert (await served.client.get("/healthz")).status == 200
        assert cut.result()
        writer.close()


@pytest.mark.parametrize("line", [b"GET /healthz", b"GET /healthz HTTP/0.9", b"GET /healthz HTTP/2.0", b"GARBAGE"])
@pytest.mark.asyncio
async def test_other_versions_of_http_and_garbage_are_refused_and_the_connection_ends(
    tmp_path: Path, line: bytes
) -> None:
    async with serve(tmp_path) as served, asyncio.timeout(60):
        reader, writer = await connect(served)
        writer.write(line + b"\r\nHost: x\r\n\r\n" if b"HTTP" in line else line + b"\r\n\r\n")
        answer = await reader.read()
        assert b" 400 " in answer.splitlines()[0]
        assert b"Server: echo-swarm\r\n" in answer, "no version of a library"
        assert (await served.client.get("/healthz")).headers["Server"] == "echo-swarm"
        writer.close()


@pytest.mark.parametrize("path", ["/v1/learner/uploads/1/model.safetensors", "/v1/auditor/verdicts"])
@pytest.mark.asyncio
async def test_an_unauthorised_upload_is_refused_and_not_read_to_its_end(tmp_path: Path, path: str) -> None:
    size = 64 * 2**20
    async with serve(tmp_path) as served, asyncio.timeout(120):
        reader, writer = await connect(served)
        method = b"PUT" if "uploads" in path else b"POST"
        writer.write(b"%b %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (method, path.encode(), size))
        assert b" 401 " in await reader.readline()
        sent = 0
        with suppress(ConnectionError):
            while sent < size:
                writer.write(bytes(2**16))
                await writer.drain()
                sent += 2**16
        assert sent < size
        writer.close()


class Line:
    """A connection from an address, as the server has it."""

    def __init__(self, address: str) -> None:
        self.address, self.is_cut, self._request_count = address, False, 1
        self.transport = self

    def get_extra_info(self, _name: str) -> tuple[str, int, int, int]:
        return self.address, 1, 0, 0

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        self.is_cut = True


def cut(addresses: list[str], per_address: int, connections: int = 10_000) -> list[str]:
    """Return the connections, in order of arrival, that are closed: this machine has no IPv6 networks."""
    lines = [Line(address) for address in addresses]
    runner: Any = SimpleNamespace(server=SimpleNamespace(connections=lines), handshakes={})
    guard.Callers(runner, per_address, Bounds(connections=connections)).close_excess(0.0)
    return [line.address for line in lines if line.is_cut]


def test_all_addresses_of_one_ipv6_network_share_its_connections() -> None:
    network, elsewhere = [f"2001:db8::{number}" for number in range(1, 5)], "2001:db8:0:100::1"
    assert cut([*network, elsewhere], 3) == network[3:]
    assert cut(["192.0.2.1", "::ffff:192.0.2.1", "192.0.2.2", "::1", "::1"], 1) == ["::ffff:192.0.2.1"]


def test_past_all_connections_the_largest_neighbourhood_loses_its_newest() -> None:
    crowd, few = [f"2001:db8::{number}" for number in range(1, 7)], ["192.0.2.1", "192.0.2.1", "198.51.100.1"]
    for share in (0, 256):
        assert cut([*crowd, *few], share, 8) == crowd[5:]
        assert cut([*few, *crowd, "127.0.0.1", "127.0.0.1"], share, 8) == crowd[3:]
        assert cut([*crowd, *few[1:]], share, 8) == []


@pytest.mark.parametrize("bound", ["time", "memory"])
@pytest.mark.asyncio
async def test_answers_that_nobody_reads_are_let_go(tmp_path: Path, bound: str) -> None:
    grace_s, unread_bytes = (0.5, 2**40) if bound == "time" else (3600.0, 0)
    bounds = replace(STRANGERS, grace_s=grace_s, bytes_per_s=2.0**30, unread_bytes=unread_bytes)
    async with serve(tmp_path, bounds=bounds) as served, asyncio.timeout(300):
        _, writer = await connect(served)
        while not waiting(served) and not writer.is_closing():  # it may be cut before it was seen to wait
            writer.write(50 * LARGE)
            await asyncio.sleep(0)
        while waiting(served):
            assert (await served.client.get("/healthz")).status == 200
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.asyncio
async def test_one_address_has_its_share_of_listeners(tmp_path: Path) -> None:
    async with serve(tmp_path, "round.listeners_per_address=2", bounds=STRANGERS) as served, asyncio.timeout(120):
        await served.publish()
        streams = [await served.client.get("/v1/events") for _ in range(2)]
        assert [stream.status for stream in streams] == [200, 200]
        assert (await served.client.get("/v1/events")).status == 503
        streams.pop().close()
        while (await served.client.get("/v1/events")).status == 503:
            pass
        streams.pop().close()


@pytest.mark.asyncio
async def test_listeners_of_one_ipv6_network_share_and_the_largest_makes_room(tmp_path: Path) -> None:
    async with (
        serve(tmp_path, "round.listeners_per_address=3", bounds=Bounds(listeners=3)) as served,
        AsyncExitStack() as stack,
    ):
        runner = served.client.server.runner
        assert isinstance(runner, web.AppRunner)
        here, ended = runner.app[watch.WATCH], list[str]()

        async def listens(address: str) -> None:
            with suppress(TimeoutError):
                async with here.listening(address):
                    await asyncio.Event().wait()
            ended.append(address)

        tasks = []
        for number in range(1, 4):
            assert here.has_room(f"2001:db8::{number}")
            tasks.append(asyncio.create_task(listens(f"2001:db8::{number}")))
            stack.callback(tasks[-1].cancel)
            await asyncio.sleep(0)
        assert not here.has_room("2001:db8::4")
        assert here.has_room("192.0.2.1")
        await tasks[-1]
        assert ended == ["2001:db8::3"]
        assert here.listeners == {"2001:db8::/56": 2}


@pytest.mark.asyncio
async def test_this_machine_has_a_quarter_of_the_streams_and_a_proxy_on_it_names_its_callers(tmp_path: Path) -> None:
    bounds = Bounds(listeners=8)
    async with serve(tmp_path, "round.listeners_per_address=1", bounds=bounds) as served, asyncio.timeout(120):
        await served.publish()
        streams = [await served.client.get("/v1/events") for _ in range(3)]
        assert [stream.status for stream in streams] == [200, 200, 503]
        for name, status in (("192.0.2.1", 200), ("192.0.2.1", 503), ("192.0.2.2", 200)):
            streams.append(await served.client.get("/v1/events", headers={"X-Forwarded-For": f"6.6.6.6, {name}"}))
            assert streams[-1].status == status
        for stream in streams:
            stream.close()


def waiting(served: Served) -> int:
    """Bytes that the server keeps for those who do not read them."""
    runner = served.client.server.runner
    assert runner is not None
    assert runner.server is not None
    found = [one.transport.get_write_buffer_size() for one in runner.server.connections if one.transport is not None]
    return sum(found)


def asked(transport: Any, arriving: BaseException | None = None) -> Any:
    """A request over this connection, whose body ended with this error."""
    content = SimpleNamespace(exception=lambda: arriving, is_eof=lambda: True)
    fields = {"method": "GET", "path": "/v1/events", "headers": {"Accept": "application/json"}}
    return SimpleNamespace(version=HttpVersion11, app={}, transport=transport, content=content, **fields)


CLOSED = SimpleNamespace(is_closing=lambda: True)
OPEN = SimpleNamespace(is_closing=lambda: False)


async def failing_with(error: BaseException, request: Any) -> int:
    async def handler(_request: Any) -> web.StreamResponse:
        raise error

    return (await http.errors(request, handler)).status


@pytest.mark.asyncio
@pytest.mark.parametrize("transport", [None, CLOSED])
@pytest.mark.parametrize(
    "error", [ClientConnectionResetError("Cannot write to closing transport"), ConnectionError("Connection lost")]
)
async def test_a_browser_that_closes_its_tab_at_once_is_no_failure(
    transport: Any, error: ConnectionError, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert await failing_with(error, asked(transport)) == http.CLIENT_LEFT
    assert caplog.text == ""


@pytest.mark.asyncio
async def test_a_client_that_leaves_while_it_uploads_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    error = ConnectionResetError(104, "Connection reset by peer")
    with caplog.at_level("INFO"):
        assert await failing_with(error, asked(CLOSED, arriving=error)) == http.CLIENT_LEFT
    assert caplog.text == ""


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("transport", "status", "level"), [(CLOSED, http.CLIENT_LEFT, "WARNING"), (OPEN, 500, "ERROR")]
)
async def test_a_lost_connection_of_our_own_is_logged_also_when_the_client_has_left(
    transport: Any, status: int, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A database that closes its connections makes clients leave: that is how its outage would be hidden."""
    own = ConnectionResetError(104, "Connection reset by peer")
    for error in (own, reraised(own)):
        assert await failing_with(error, asked(transport)) == status
    assert [record.levelname for record in caplog.records] == [level] * 2
    assert "Connection reset by peer" in caplog.text


def reraised(cause: BaseException) -> ClientConnectionResetError:
    """The error of our own HTTP client, which names its cause."""
    error = ClientConnectionResetError("Cannot write request body")
    error.__cause__ = cause
    return error


NO_REQUESTS = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET http://[::1/x HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nA: \x00\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 500 + b"\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    bytes(100),
)


@pytest.mark.asyncio
async def test_flooding_the_log_with_what_is_no_request_writes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is a few bytes; a traceback would be a thousand, and a stranger could fill the disk with them."""
    with caplog.at_level("INFO"):
        async with serve(tmp_path) as served, asyncio.timeout(60):
            for sent in NO_REQUESTS:
                reader, writer = await connect(served)
                writer.write(sent)
                assert b" 400 " in (await reader.read()).split(b"\r\n")[0]
                writer.close()
            reader, writer = await connect(served)
            assert await is_answered(reader, writer)
            writer.close()
    assert [record.getMessage() for record in caplog.records if record.name.startswith("aiohttp")] == []
