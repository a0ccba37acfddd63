"""Queries that are open when the round ends: answered by a node that works on them, or refused at once."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from protocol.work.lease import Lease
from protocol.work.messages import HeartbeatReply, ReturnLeases
from tests.coordinator.api.test_completions import (
    ask,
    echoed,
    make_key,
    next_event,
    post,
    refused,
    the_lease_of_a_query,
    until,
)
from tests.coordinator.served import Served, serve

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serve(tmp_path) as made:
        await made.publish()
        yield made


async def finish(served: Served) -> None:
    response = await served.client.post("/v1/learner/finish", headers=served.operator)
    assert response.status == 204


async def test_a_query_that_waits_when_the_round_ends_is_refused_as_new_ones_are(served: Served) -> None:
    key = await make_key(served)
    waiting = asyncio.create_task(refused(served, key))
    streaming = asyncio.create_task(post(served, key, {"model": "swarm", "prompt": "1+2=", "stream": True}))
    await until(served, ["open", "open"])
    await finish(served)
    status, error = await waiting
    assert (status, error) == await refused(served, key)
    assert (status, error["code"]) == (404, "not_found")
    assert (await next_event(await streaming))["error"]["message"] == error["message"]
    await until(served, ["withdrawn", "withdrawn"])


async def test_a_query_that_a_node_works_on_when_the_round_ends_is_answered_or_refused_if_the_node_returns_it(
    served: Served,
) -> None:
    key, nodes = await make_key(served), [await served.join(number) for number in (1, 2)]
    waiting, leased = list[asyncio.Task[Any]](), list[Lease]()
    for node, caller in zip(nodes, (ask, refused), strict=True):
        waiting.append(asyncio.create_task(caller(served, key)))
        leased.append(await the_lease_of_a_query(served, node))
    await finish(served)
    await served.submit(nodes[0], echoed(served, nodes[0], leased[0]))
    assert (await waiting[0])["choices"][0]["text"] == "1+2="
    returned = ReturnLeases(lease_ids=(leased[1].lease_id,))
    await served.call(nodes[1], "/v1/leases/return", returned, HeartbeatReply)
    assert (await waiting[1])[0] == 404
