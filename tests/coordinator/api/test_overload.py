"""More requests than the writer can take: nodes are told when to come again, and the learner keeps its way."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
import sqlalchemy as sa
from aiohttp import ClientSession, TCPConnector

from coordinator.api.guard import SHARES, Bounds, Runner
from coordinator.api.http import RETRY_AFTER_S
from coordinator.api.strangers import STRANGERS_READS
from coordinator.store.state import READS_WAITING_MAX, STRANGERS_READS_MAX, WAITING_MAX
from ledger.payout_proof import PayoutRequest
from protocol.people.owner import EarningsRequest
from protocol.wire import canonical
from protocol.wire.message import Message
from protocol.work.auditing import Why
from protocol.work.messages import HeartbeatReply, VersionRequest
from tests.coordinator.served import Served, serve

pytestmark = pytest.mark.asyncio

NEWS, QUESTION = "/v1/versions", VersionRequest(newer_than=0)


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serve(tmp_path) as here:
        await here.publish()
        yield here


@asynccontextmanager
async def writer_is_held(served: Served) -> AsyncIterator[None]:
    free = threading.Event()

    def waits(_connection: sa.Connection) -> None:
        free.wait(60)

    held = asyncio.create_task(served.round.database.run(waits))
    await asyncio.sleep(0)
    try:
        yield
    finally:
        free.set()
        await held


def nothing(_connection: sa.Connection) -> None: ...


async def waiting_is(served: Served, number: int) -> None:
    while served.round.database.waiting != number:  # noqa: ASYNC110  # nobody else needs to be told of it
        await asyncio.sleep(0.01)


async def test_past_saturation_nodes_get_503_with_retry_after_and_the_learner_is_served(served: Served) -> None:
    key = await served.join()
    database = served.round.database
    async with asyncio.timeout(60):
        async with writer_is_held(served):
            others = [asyncio.create_task(database.run_for_node(nothing)) for _ in range(WAITING_MAX - 1)]
            last = asyncio.create_task(served.call(key, NEWS, QUESTION, HeartbeatReply))
            await waiting_is(served, WAITING_MAX)
            refused = await served.post(NEWS, b"not even a signature is looked at")
            learner = asyncio.create_task(served.client.get("/v1/learner/state", headers=served.operator))
        assert (refused.status, canonical.decode(await refused.read())["code"]) == (503, "overloaded")
        assert RETRY_AFTER_S[0] <= int(refused.headers["Retry-After"]) <= RETRY_AFTER_S[1]
        assert (await learner).status == 200
        assert (await last).newest_version == 1
        await asyncio.gather(*others)
    await served.call(key, NEWS, QUESTION, HeartbeatReply)


async def test_who_hangs_up_while_waiting_leaves_room_for_others(served: Served) -> None:
    key = await served.join()
    async with asyncio.timeout(60), writer_is_held(served):
        asked = asyncio.create_task(served.call(key, NEWS, QUESTION, HeartbeatReply))
        await waiting_is(served, 1)
        asked.cancel()
        await waiting_is(served, 0)


async def test_strangers_words_about_owners_wait_in_the_nodes_line_and_never_before_the_learner(served: Served) -> None:
    database = served.round.database
    async with asyncio.timeout(60):
        async with writer_is_held(served):
            others = [asyncio.create_task(database.run_for_node(nothing)) for _ in range(WAITING_MAX)]
            await waiting_is(served, WAITING_MAX)
            refused = await served.post("/v1/owners", b"not even a signature is looked at")
        assert refused.status == 503
        await asyncio.gather(*others)


async def strangers_waiting_are(served: Served, number: int) -> None:
    runner = served.client.server.runner
    assert runner is not None
    assert isinstance(runner, Runner)
    while runner.app[STRANGERS_READS].size != number:  # noqa: ASYNC110  # nobody else needs to be told of it
        await asyncio.sleep(0.01)


@asynccontextmanager
async def strangers_wait(served: Served, path: str, crowd: int) -> AsyncIterator[None]:
    """A crowd that asks for `path`, behind a read of a stranger that takes long."""
    free = threading.Event()
    held = asyncio.create_task(served.round.database.read_for_stranger(lambda _connection: free.wait(60)))
    await asyncio.sleep(0)
    asked = [asyncio.create_task(served.client.get(path)) for _ in range(crowd)]
    await strangers_waiting_are(served, crowd)
    try:
        yield
    finally:
        free.set()
        await asyncio.gather(held, *asked)


@pytest.mark.parametrize("path", ["/entries", "/v1/ledger/checkpoint", "/v1/training/settings/" + "0" * 64])
async def test_a_crowd_of_strangers_that_reads_delays_no_node_and_not_the_round(served: Served, path: str) -> None:
    """Rewards, publications and answers to queries are read, too: what strangers ask for must not be before them."""
    key = await served.join()
    async with asyncio.timeout(60), strangers_wait(served, path, STRANGERS_READS_MAX):
        refused = await served.client.get("/entries")
        assert (refused.status, "Retry-After" in refused.headers) == (503, True)
        await served.call(key, NEWS, QUESTION, HeartbeatReply)
        await served.round.database.read(nothing)


@pytest.mark.parametrize(
    ("path", "message"),
    [("/v1/earnings", EarningsRequest()), ("/v1/payouts", PayoutRequest(batch=1)), ("/v1/verdicts", Why())],
)
async def test_what_a_free_key_may_read_is_read_among_strangers(served: Served, path: str, message: Message) -> None:
    """Keys cost nothing: a crowd of them, too, delays neither nodes' work nor the round's own reads."""
    key, free = await served.join(), threading.Event()
    async with asyncio.timeout(60):
        held = asyncio.create_task(served.round.database.read_for_stranger(lambda _connection: free.wait(60)))
        asked = asyncio.create_task(served.post(path, served.sealed(key, path, message)))
        await strangers_waiting_are(served, 1)
        await served.round.database.read(nothing)
        free.set()
        await held
        assert (await asked).status == 200


@pytest.mark.skipif(sys.platform != "linux", reason="only there 127.0.0.2 is an address of this machine unasked")
async def test_a_crowd_at_a_few_addresses_locks_out_no_other_address(tmp_path: Path) -> None:
    """A node's look at the log takes the place of the crowd's newest request, and is answered."""
    async with serve(tmp_path, bounds=Bounds(proxies=())) as served, asyncio.timeout(60), AsyncExitStack() as stack:
        await served.publish()
        free, asked = threading.Event(), []
        held = asyncio.create_task(served.round.database.read_for_stranger(lambda _connection: free.wait(60)))
        for number in range(2, 2 + SHARES):
            line = TCPConnector(local_addr=(f"127.0.0.{number}", 0))
            crowd = await stack.enter_async_context(ClientSession(connector=line))
            for _ in range(STRANGERS_READS_MAX // SHARES):
                asked.append(asyncio.create_task(crowd.get(served.client.make_url("/entries"))))
            await strangers_waiting_are(served, len(asked))
        node = asyncio.create_task(served.client.get("/entries"))
        done, _ = await asyncio.wait((*asked, node), return_when=asyncio.FIRST_COMPLETED)
        assert node not in done
        assert [(await one).status for one in done] == [503]
        free.set()
        assert (await node).status == 200
        assert sorted([(await one).status for one in asked])[-2:] == [200, 503]
        await held


@pytest.mark.skipif(sys.platform != "linux", reason="only there 127.0.0.2 is an address of this machine unasked")
async def test_a_strangers_address_has_a_quarter_of_the_reads_that_wait(tmp_path: Path) -> None:
    quarter = STRANGERS_READS_MAX // SHARES
    async with serve(tmp_path, bounds=Bounds(proxies=())) as served, asyncio.timeout(60), AsyncExitStack() as stack:
        other = await stack.enter_async_context(ClientSession(connector=TCPConnector(local_addr=("127.0.0.2", 0))))
        async with strangers_wait(served, "/entries", quarter):
            assert (await served.client.get("/entries")).status == 503
            waits = asyncio.create_task(other.get(served.client.make_url("/entries")))
            await strangers_waiting_are(served, quarter + 1)
        assert (await waits).status == 200


async def test_a_crowd_with_invented_keys_is_answered_and_takes_no_place_of_the_rounds_reads(served: Served) -> None:
    free, runner = threading.Event(), served.client.server.runner
    assert runner is not None
    assert runner.server is not None
    url, key = served.client.make_url("/v1/models"), {"Authorization": "Bearer es-invented"}
    async with asyncio.timeout(60), ClientSession(connector=TCPConnector(limit=0)) as crowd:
        held = asyncio.create_task(served.round.database.read(lambda _connection: free.wait(60)))
        asked = [asyncio.create_task(crowd.get(url, headers=key)) for _ in range(READS_WAITING_MAX + 1)]
        try:
            while len(runner.server.connections) < len(asked):  # noqa: ASYNC110  # nobody else needs to be told of it
                await asyncio.sleep(0.01)
            assert (await served.client.get("/nothing")).status == 404, "they have had their turn at the event loop"
            own = asyncio.create_task(served.round.database.read(nothing))
        finally:
            free.set()
        assert {response.status for response in await asyncio.gather(*asked)} == {401}
        await asyncio.gather(held, own)
