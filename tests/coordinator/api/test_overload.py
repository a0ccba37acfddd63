"""More requests than the writer can take: nodes are told when to come again, and the learner keeps its way."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
import sqlalchemy as sa

from coordinator.api.http import RETRY_AFTER_S
from coordinator.store.state import WAITING_MAX
from protocol.wire import canonical
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
