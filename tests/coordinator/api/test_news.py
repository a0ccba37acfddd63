"""News of versions: a question is held until there is an answer, and nobody holds more than a few."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from coordinator.service import news
from protocol.wire import canonical
from protocol.wire.signing import NodeKey
from protocol.work.messages import HeartbeatReply, VersionRequest
from tests.coordinator.served import Served, serve

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serve(tmp_path) as here:
        yield here


async def test_a_question_for_a_newer_version_is_answered_the_moment_it_is_published(served: Served) -> None:
    await served.publish()
    key = await served.join()
    question = VersionRequest(newer_than=1)
    async with asyncio.timeout(news.NEWS_HOLD_S / 2):
        assert (await served.call(key, "/v1/versions", VersionRequest(newer_than=0), HeartbeatReply)).newest_version
        waiting = asyncio.create_task(served.call(key, "/v1/versions", question, HeartbeatReply))
        await served.publish(2)
        assert (await waiting).newest_version == 2


async def test_a_node_that_asks_for_news_a_thousand_times_holds_two_requests(served: Served) -> None:
    await served.publish()
    key = await served.join()
    question = VersionRequest(newer_than=1)
    async with asyncio.timeout(news.NEWS_HOLD_S / 2):
        asked = {
            asyncio.create_task(served.call(key, "/v1/versions", question, HeartbeatReply))
            for _ in range(news.HELD_PER_NODE + 20)
        }
        while len(asked) > news.HELD_PER_NODE:
            _, asked = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        await served.publish(2)
        assert {(await reply).newest_version for reply in asked} == {2}
    assert not served.round.news.held_requests


async def test_a_stranger_cannot_hold_a_question_open(served: Served) -> None:
    question = served.sealed(NodeKey(bytes(32)), "/v1/versions", VersionRequest(newer_than=9))
    response = await served.post("/v1/versions", question)
    assert (response.status, canonical.decode(await response.read())["code"]) == (403, "unknown_node")
