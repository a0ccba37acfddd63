"""Callers of the endpoint that read their stream slowly, or never: memory, other callers, and who pays."""

import asyncio
import json
import socket
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import sqlalchemy as sa

from coordinator.api.guard import Bounds
from coordinator.service.waiting import NEWS_MAX
from coordinator.store import tables
from protocol.policy.chunks import digest
from protocol.wire.signing import Envelope, NodeKey
from protocol.work.lease import Lease
from protocol.work.messages import HeartbeatReply
from protocol.work.rollout import RolloutClaim, Sample, pack_logprobs, pack_tokens
from tests.coordinator.api.test_callers import waiting
from tests.coordinator.api.test_completions import (
    BEAT,
    ask,
    echoed,
    make_key,
    queries,
    report,
    reported,
    the_lease_of_a_query,
    until,
)
from tests.coordinator.policy_files import encode
from tests.coordinator.served import Served, serve

pytestmark = pytest.mark.asyncio

TOKENS = 500
SAMPLES = 16
BUFFER_BYTES = 4096
"""The buffers of the sockets: a stream is many times as large."""

IMPATIENT = Bounds(proxies=(), look_s=0.02, grace_s=0.3, bytes_per_s=2.0**30, lease_hold_s=0.1)


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serve(tmp_path, f"sampling.max_new_tokens={TOKENS}", bounds=IMPATIENT) as made, asyncio.timeout(120):
        await made.publish()
        yield made


async def open_stream(served: Served, key: str) -> tuple[StreamReader, StreamWriter]:
    """Ask for a stream on a connection that receives little before it is read."""
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    line.setblocking(False)
    assert served.client.port is not None
    await asyncio.get_running_loop().sock_connect(line, (served.client.host, served.client.port))
    reader, writer = await asyncio.open_connection(sock=line, limit=1)  # what is not read stays in the socket
    fields = {"model": "swarm", "prompt": "1+2=", "n": SAMPLES, "stream": True, "logprobs": 0, "return_token_ids": True}
    body = json.dumps(fields).encode()
    head = ("POST /v1/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", f"Content-Length: {len(body)}")
    writer.write("\r\n".join((*head, "", "")).encode() + body)
    return reader, writer


def shrink_buffers(served: Served) -> None:
    """Let the server's sockets hold little of what is not read; so it stays in the server, which has to bound it."""
    runner = served.client.server.runner
    assert runner is not None
    assert runner.server is not None
    for connection in runner.server.connections:
        if connection.transport is not None:
            line = connection.transport.get_extra_info("socket")
            line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)


def long_answer(served: Served, node: NodeKey, lease: Lease) -> bytes:
    sample = Sample(tokens=pack_tokens([3] * TOKENS), logprobs=pack_logprobs([-0.5] * TOKENS), finish="length")
    fields = {"round_id": served.round.round_id, "lease_id": lease.lease_id, "lease_digest": lease.digest}
    return node.seal("rollout", RolloutClaim(**fields, samples=(sample,) * lease.samples).to_bytes())


async def node_of(served: Served) -> NodeKey:
    node = await served.join(1)
    await served.call(node, "/v1/heartbeat", BEAT, HeartbeatReply)
    return node


async def usage(served: Served, key: str) -> dict[str, Any]:
    response = await served.client.get("/v1/usage", headers={"Authorization": f"Bearer {key}"})
    found: dict[str, Any] = await response.json()
    return found


async def credited(served: Served) -> list[int]:
    """The credit of each rollout that was accepted."""
    rows = await served.round.database.read(lambda connection: connection.execute(tables.rollouts.select()).all())
    return [row.credit_micros for row in rows]


async def test_streams_that_nobody_reads_are_ended_charged_once_and_stop_nobody(served: Served) -> None:
    key, node = await make_key(served, 10**9), await node_of(served)
    streams = [await open_stream(served, key) for _ in range(6)]
    await until(served, ["open"] * len(streams))
    shrink_buffers(served)
    for _ in streams:
        (lease,) = await served.lease(node)
        await served.submit(node, long_answer(served, node, lease))
    while not waiting(served):  # noqa: ASYNC110 - until an answer is written
        await asyncio.sleep(0.01)
    other = asyncio.create_task(ask(served, key, max_tokens=4))
    await until(served, ["answered"] * len(streams) + ["open"])
    (lease,) = await served.lease(node)
    await served.submit(node, echoed(served, node, lease))
    assert (await other)["choices"][0]["text"] == "1+2="
    while waiting(served):  # noqa: ASYNC110 - the server looks often
        await asyncio.sleep(0.01)
    assert await queries(served) == ["answered"] * 7
    found, paid = await usage(served, key), await credited(served)
    assert (len(paid), found["spent_micros"], found["reserved_micros"]) == (7, sum(paid), 0)
    assert found["tokens"] == 6 * SAMPLES * TOKENS + 4
    for _, writer in streams:
        writer.close()


async def test_a_caller_that_has_read_tokens_and_leaves_pays_for_its_answer(served: Served) -> None:
    """Else whoever hangs up before the last event has the tokens for nothing, and the round pays the node."""
    key, node = await make_key(served, 10**9), await node_of(served)
    reader, writer = await open_stream(served, key)
    lease = await the_lease_of_a_query(served, node)
    await report(served, node, reported(served, node, lease, [3] * 8))
    while b"data: " not in await reader.read(256):
        pass
    writer.transport.abort()
    while len(served.round.waiting.queries):  # noqa: ASYNC110 - the server has to see it
        await asyncio.sleep(0.01)
    await served.submit(node, long_answer(served, node, lease))
    assert await queries(served) == ["answered"]
    found, paid = await usage(served, key), await credited(served)
    assert (len(paid), found["spent_micros"], found["reserved_micros"]) == (1, sum(paid), 0)
    assert found["spent_micros"] > 0


async def test_a_caller_that_leaves_its_stream_before_the_first_token_pays_the_node_that_answers(
    served: Served,
) -> None:
    """Else whoever hangs up after each lease spends the round's budget instead of the key's."""
    key, node = await make_key(served, 10**9), await node_of(served)
    _, writer = await open_stream(served, key)
    lease = await the_lease_of_a_query(served, node)
    writer.transport.abort()
    await until(served, ["withdrawn"])
    assert (await usage(served, key))["reserved_micros"] > 0
    await served.submit(node, long_answer(served, node, lease))
    found, paid = await usage(served, key), await credited(served)
    assert (found["spent_micros"], found["reserved_micros"], found["answered_queries"]) == (sum(paid), 0, 0)
    assert found["spent_micros"] > 0


async def test_the_growth_of_a_stream_that_nobody_reads_stays_in_the_store(served: Served) -> None:
    key, node = await make_key(served, 10**9), await node_of(served)
    _, writer = await open_stream(served, key)
    lease = await the_lease_of_a_query(served, node)
    (number,) = await served.round.database.read(
        lambda there: there.execute(sa.select(tables.queries.c.number)).scalars()
    )
    with served.round.waiting.queries.awaited([number], grows=True) as news:
        previous = ""
        for start in range(NEWS_MAX + 10):
            fragment = reported(served, node, lease, encode("1"), start, previous)
            await report(served, node, fragment)
            previous = digest(Envelope.from_bytes(fragment).payload)
        await served.submit(node, long_answer(served, node, lease))
        while len(served.round.waiting.queries):  # noqa: ASYNC110 - until it has looked
            await asyncio.sleep(0.01)
        assert news.qsize() == NEWS_MAX + 1, "the answer comes in any case"
    writer.transport.abort()
