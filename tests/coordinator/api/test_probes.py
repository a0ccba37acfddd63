"""Probes of a machine's connection: bounded bytes, and a dial that cannot scan others."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio
from aiohttp import ClientSession, TCPConnector

from coordinator.api.guard import SHARES, Bounds
from coordinator.api.nodes import DIALS_AT_ONCE
from protocol import limits
from protocol.wire import canonical
from protocol.wire.signing import NodeKey
from protocol.work.messages import DIAL_S, Dial, Dialled, Uploaded
from tests.coordinator.served import Served, serve

pytestmark = pytest.mark.asyncio

KEY = NodeKey(b"k" * 32)
WORD = "ab" * 16


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serve(tmp_path) as here:
        yield here


@asynccontextmanager
async def listener(says: bytes, host: str = "127.0.0.1") -> AsyncIterator[int]:
    """Listen on this machine, and send `says` to every caller."""

    async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, host, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


async def test_bytes_are_counted_and_thrown_away_up_to_the_bound(served: Served) -> None:
    for size in (0, 1, limits.PROBE_MAX_BYTES):
        response = await served.post("/v1/probe/upload", bytes(size))
        assert Uploaded.from_bytes(await response.read()).size_bytes == size
    response = await served.post("/v1/probe/upload", bytes(limits.PROBE_MAX_BYTES + 1))
    assert canonical.decode(await response.read())["code"] == "message_too_large"


async def test_a_machine_that_says_the_word_is_reached(served: Served) -> None:
    async with listener(WORD.encode()) as port:
        found = await served.call(KEY, "/v1/probe/dial", Dial(port=port, word=WORD), Dialled)
    assert found == Dialled(reached=True, proxied=False)


@pytest.mark.parametrize("says", [b"SSH-2.0-OpenSSH_9.6 and a long banner behind it\r\n", b"", WORD.encode()[:-1]])
async def test_an_open_port_of_somebody_else_looks_like_a_closed_one(served: Served, says: bytes) -> None:
    loop = asyncio.get_running_loop()
    async with listener(says) as port:
        started = loop.time()
        found = await served.call(KEY, "/v1/probe/dial", Dial(port=port, word=WORD), Dialled)
        assert (found.reached, loop.time() - started >= DIAL_S) == (False, True)


async def test_a_closed_port_is_told_of_no_sooner(served: Served) -> None:
    async with listener(b"") as port:
        pass
    started = asyncio.get_running_loop().time()
    found = await served.call(KEY, "/v1/probe/dial", Dial(port=port, word=WORD), Dialled)
    assert (found.reached, asyncio.get_running_loop().time() - started >= DIAL_S) == (False, True)


async def test_behind_a_proxy_that_does_not_name_its_caller_nobody_is_dialled(served: Served) -> None:
    data = served.sealed(KEY, "/v1/probe/dial", Dial(port=9, word=WORD))
    response = await served.client.post("/v1/probe/dial", data=BytesIO(data), headers={"Via": "1.1 proxy"})
    assert Dialled.from_bytes(await response.read()) == Dialled(reached=False, proxied=True)
    again = await served.post("/v1/probe/dial", data)
    assert canonical.decode(await again.read())["code"] == "nonce_replayed"


async def test_nobody_makes_the_coordinator_dial_an_address_of_his_choice(tmp_path: Path) -> None:
    async with serve(tmp_path, bounds=Bounds(proxies=())) as served, listener(WORD.encode()) as port:
        data = served.sealed(KEY, "/v1/probe/dial", Dial(port=port, word=WORD))
        headers = {"X-Forwarded-For": "127.0.0.1"}
        response = await served.client.post("/v1/probe/dial", data=BytesIO(data), headers=headers)
        assert Dialled.from_bytes(await response.read()) == Dialled(reached=False, proxied=True)


async def test_a_node_behind_a_trusted_proxy_is_dialled_itself(served: Served) -> None:
    async with listener(WORD.encode(), "127.0.0.9") as port:
        data = served.sealed(KEY, "/v1/probe/dial", Dial(port=port, word=WORD))
        headers = {"X-Forwarded-For": "127.0.0.9"}
        response = await served.client.post("/v1/probe/dial", data=BytesIO(data), headers=headers)
        assert Dialled.from_bytes(await response.read()) == Dialled(reached=True, proxied=False)


@pytest.mark.skipif(sys.platform != "linux", reason="only there 127.0.0.2 is an address of this machine unasked")
async def test_taking_all_dials_from_one_address_leaves_room_for_others(tmp_path: Path) -> None:
    """A key is free and a dial without an answer takes seconds: a stranger could have all of them, all the time."""
    quarter = DIALS_AT_ONCE // SHARES
    async with AsyncExitStack() as stack, asyncio.timeout(60):
        served = await stack.enter_async_context(serve(tmp_path, bounds=Bounds(proxies=())))
        clients = [ClientSession(connector=TCPConnector(local_addr=(f"127.0.0.{last}", 0))) for last in (2, 3)]
        one, other = [await stack.enter_async_context(client) for client in clients]
        mute = await stack.enter_async_context(mute_listener("127.0.0.2"))
        greeting = await stack.enter_async_context(listener(WORD.encode(), "127.0.0.3"))
        waiting = [asyncio.create_task(dial_from(one, served, mute.port)) for _ in range(quarter)]
        for _ in waiting:
            await mute.called.acquire()
        assert await dial_from(one, served, mute.port) == "overloaded"
        assert await dial_from(other, served, greeting) == Dialled(reached=True, proxied=False)
        assert await asyncio.gather(*waiting) == [Dialled(reached=False, proxied=False)] * quarter


async def dial_from(client: ClientSession, served: Served, port: int) -> Dialled | str:
    """Return the result of a dial, or the code of its refusal."""
    data = served.sealed(KEY, "/v1/probe/dial", Dial(port=port, word=WORD))
    async with client.post(served.client.make_url("/v1/probe/dial"), data=BytesIO(data)) as response:
        body = await response.read()
    return Dialled.from_bytes(body) if response.status == 200 else str(canonical.decode(body)["code"])


class Mute(NamedTuple):
    """A port that never says a word, and a count of those who called it."""

    port: int
    called: asyncio.Semaphore


@asynccontextmanager
async def mute_listener(host: str) -> AsyncIterator[Mute]:
    called = asyncio.Semaphore(0)

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        called.release()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hold, host, 0)
    try:
        yield Mute(server.sockets[0].getsockname()[1], called)
    finally:
        server.close()
        await server.wait_closed()
