"""Bodies that never end, from one neighbourhood or from many: memory keeps to its budget, and honest work passes."""

import asyncio
import sys
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import ClientSession, TCPConnector, web

from coordinator.api.guard import BODIES, Bounds
from protocol import limits
from protocol.wire import canonical
from protocol.work.messages import Submission
from tests.coordinator.served import Served, serve

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(sys.platform != "linux", reason="only there 127.0.0.2 is an address of this machine unasked"),
]

BUDGET = 4 * limits.MIB
"""So small that tests hold little; the rule is that of the real one."""

BODY = limits.MIB // 2
HALF = bytes(BODY // 2)


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serve(tmp_path, bounds=Bounds(proxies=(), bodies_bytes=BUDGET)) as here:
        yield here


class Sender:
    """A client that sends endless bodies, each over a connection of its own."""

    def __init__(self, served: Served, address: str) -> None:
        self._served, self._address = served, address
        self._lines: list[tuple[StreamReader, StreamWriter]] = []

    async def begin(self, *, declared: bool = True) -> StreamReader:
        """Begin a body, and send half of it."""
        client = self._served.client
        assert client.port is not None
        reader, writer = await asyncio.open_connection(client.host, client.port, local_addr=(self._address, 0))
        head = f"Content-Length: {BODY}" if declared else "Transfer-Encoding: chunked"
        piece = HALF if declared else b"%x\r\n%b\r\n" % (len(HALF), HALF)
        writer.write(b"POST /v1/rollouts HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n%b" % (head.encode(), piece))
        self._lines.append((reader, writer))
        return reader

    async def close(self) -> None:
        for _, writer in self._lines:
            writer.close()


def held(served: Served) -> int:
    runner = served.client.server.runner
    assert isinstance(runner, web.AppRunner)
    return runner.app[BODIES].held_bytes


async def until_held(served: Served, size: int) -> None:
    async with asyncio.timeout(20):  # less than a body may take that does not come
        while held(served) != size:
            assert (await served.client.get("/healthz")).status == 200


async def refused(reader: StreamReader) -> None:
    async with asyncio.timeout(20):
        head = await reader.readuntil(b"\r\n\r\n")
    assert b" 503 " in head.splitlines()[0]
    assert b"Retry-After: " in head


async def submits(served: Served, address: str) -> int:
    """The status of an honest submission, as large as the half bodies, from an address."""
    key = await served.join()
    message = Submission(rollouts=(bytes(BODY - limits.KIB),))
    connector = TCPConnector(local_addr=(address, 0))
    async with ClientSession(connector=connector) as session:
        url = served.client.make_url("/v1/rollouts")
        async with session.post(url, data=served.sealed(key, "/v1/rollouts", message)) as response:
            answer = canonical.decode(await response.read())
            if response.status == 503:
                assert answer["code"] == "overloaded"
            return response.status


@pytest.mark.parametrize("declared", [True, False])
async def test_half_bodies_of_one_address_hold_a_quarter_of_the_budget(served: Served, declared: bool) -> None:
    await served.publish()
    fit = BUDGET // 4 // (BODY if declared else len(HALF))
    async with AsyncExitStack() as stack:
        stack.push_async_callback((sender := Sender(served, "127.0.0.2")).close)
        for _ in range(fit):
            await sender.begin(declared=declared)
        await until_held(served, BUDGET // 4)
        for _ in range(3):
            await refused(await sender.begin(declared=declared))
        assert held(served) == BUDGET // 4
        assert await submits(served, "127.0.0.2") == 503
        assert await submits(served, "127.0.0.3") == 200
        assert held(served) == BUDGET // 4
    await until_held(served, 0)


async def test_where_many_fill_the_budget_the_largest_loses_its_oldest_body_to_who_has_less(served: Served) -> None:
    await served.publish()
    async with AsyncExitStack() as stack:
        oldest = []
        for last in range(2, 6):
            stack.push_async_callback((sender := Sender(served, f"127.0.0.{last}")).close)
            oldest.append(await sender.begin())
            await until_held(served, (last - 2) * BUDGET // 4 + BODY)  # since connections may come in any order
            for _ in range(BUDGET // 4 // BODY - 1):
                await sender.begin()
            await until_held(served, (last - 1) * BUDGET // 4)
        assert await submits(served, "127.0.0.9") == 200
        await until_held(served, BUDGET - BODY)
        await refused(oldest[0])


async def test_a_small_body_needs_no_room_and_a_finished_one_leaves_it(served: Served) -> None:
    await served.publish()
    async with AsyncExitStack() as stack:
        for last in range(2, 6):
            stack.push_async_callback((sender := Sender(served, f"127.0.0.{last}")).close)
            for _ in range(BUDGET // 4 // BODY):
                await sender.begin()
            await until_held(served, (last - 1) * BUDGET // 4)
        key = await served.join()  # small, and signed: the address with its whole share may still say so
        assert len(await served.lease(key)) == 1
    await until_held(served, 0)
    for _ in range(2 * BUDGET // BODY):
        assert await submits(served, "127.0.0.2") == 200
    assert held(served) == 0


async def test_what_the_operators_programs_send_is_not_counted(served: Served) -> None:
    await served.publish()
    async with AsyncExitStack() as stack:
        stack.push_async_callback((sender := Sender(served, "127.0.0.1")).close)
        for _ in range(BUDGET // 4 // BODY):
            await sender.begin()
        await until_held(served, BUDGET // 4)
        path, body = "/v1/learner/progress", bytes(BODY)
        assert (await served.client.post(path, data=body, headers=served.operator)).status == 400
        assert (await served.client.post(path, data=body)).status == 401
