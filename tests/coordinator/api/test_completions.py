"""The endpoint over HTTP: what callers get, while nodes work, die or are not there."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import pytest
import pytest_asyncio
import sqlalchemy as sa
from aiohttp import ClientResponse, ClientSession, TCPConnector

from coordinator.api.guard import Bounds
from coordinator.base.clock import now_ms
from coordinator.store import tables
from coordinator.transactions import api_keys
from echo_swarm import Swarm
from protocol import limits
from protocol.policy.chunks import digest
from protocol.wire.signing import Envelope, NodeKey
from protocol.work.fragment import Fragment, FragmentPart
from protocol.work.lease import Lease
from protocol.work.messages import (
    Heartbeat,
    HeartbeatReply,
    LeaseProgress,
    LeaseProgressReply,
    ReturnLeases,
    Transfer,
)
from protocol.work.rollout import RolloutClaim, Sample, pack_logprobs, pack_tokens, unpack_tokens
from tests.coordinator.policy_files import END_TOKEN, encode
from tests.coordinator.served import Served, serve

BEAT = Heartbeat(
    session="0" * 16,
    version=1,
    phase="idle",
    tokens_per_s=0.0,
    transfer=Transfer(from_peers=0, from_seeder=0, from_http=0, to_peers=0),
    blames=(),
    reached=(),
)

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serve(tmp_path) as made:
        await made.publish()
        yield made


@pytest_asyncio.fixture
async def patient(tmp_path: Path) -> AsyncIterator[Served]:
    """A coordinator that holds the requests of idle nodes for as long as a slow machine needs."""
    async with serve(tmp_path, bounds=Bounds(lease_hold_s=600.0)) as made:
        await made.publish()
        yield made


async def make_key(served: Served, budget_micros: int = 10**6) -> str:
    key: str = await served.round.database.run(api_keys.make, "caller", budget_micros, now_ms=now_ms())
    return key


def echoed(served: Served, key: NodeKey, lease: Lease) -> bytes:
    """An answer that repeats the prompt, as far as the lease allows."""
    said = [*unpack_tokens(lease.prompt).tolist(), END_TOKEN][: lease.tokens_max or 6]
    finish: Literal["stop", "length"] = "stop" if said[-1] == END_TOKEN else "length"
    sample = Sample(tokens=pack_tokens(said), logprobs=pack_logprobs([-0.5] * len(said)), finish=finish)
    fields = {"round_id": served.round.round_id, "lease_id": lease.lease_id, "lease_digest": lease.digest}
    return key.seal("rollout", RolloutClaim(**fields, samples=(sample,) * lease.samples).to_bytes())


@asynccontextmanager
async def working(served: Served, number: int = 1) -> AsyncIterator[list[Lease]]:
    """A node that answers queries and leaves other groups; yield the leases that it has answered."""
    node, answered = await served.join(number), list[Lease]()
    await served.call(node, "/v1/heartbeat", BEAT, HeartbeatReply)

    async def work() -> None:
        while True:
            for lease in await served.lease(node, groups=4):
                if len(unpack_tokens(lease.prompt)) < len("47+38="):
                    answered.append(lease)
                    await served.submit(node, echoed(served, node, lease))
            await asyncio.sleep(0.01)

    task = asyncio.create_task(work())
    try:
        yield answered
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def post(served: Served, key: str, body: Any, path: str = "/v1/completions") -> ClientResponse:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await served.client.post(path, data=data, headers={"Authorization": f"Bearer {key}"})


async def ask(served: Served, key: str, **fields: Any) -> dict[str, Any]:
    response = await post(served, key, {"model": "swarm", "prompt": "1+2=", **fields})
    found: dict[str, Any] = await response.json()
    assert response.status == 200, found
    return found


async def refused(served: Served, key: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    response = await post(served, key, {"model": "swarm", "prompt": "1+2=", **fields})
    found = await response.json()
    assert set(found) == {"error"}, found
    return response.status, found["error"]


async def test_a_node_answers_in_openais_form(served: Served) -> None:
    key = await make_key(served)
    async with working(served):
        found = await ask(served, key, n=2, logprobs=1, return_token_ids=True)
    first, second = found["choices"]
    assert (first["index"], first["text"], first["finish_reason"]) == (0, "1+2=", "stop")
    assert second["index"] == 1
    assert first["prompt_token_ids"] == encode("1+2=")
    assert first["token_ids"] == [*encode("1+2="), END_TOKEN]
    assert first["logprobs"]["token_logprobs"] == [-0.5] * 5
    assert found["usage"] == {"prompt_tokens": 4, "completion_tokens": 10, "total_tokens": 14}
    assert (found["object"], found["model"], found["version"]) == ("text_completion", "swarm", 1)
    rows = await served.round.database.read(lambda connection: connection.execute(tables.rollouts.select()).all())
    assert {choice["receipt"] for choice in found["choices"]} == {row.claim_id for row in rows}


@pytest.mark.parametrize(
    ("asked", "leased"),
    [(0, 0.0), (-0.0, 0.0), (1e-6, 0.0), (0.01, 0.01), (0.7, 0.7), (2, 2.0), (1, None), (1.0, None), (None, None)],
)
async def test_a_lease_has_the_temperature_of_its_request_if_it_is_not_the_rounds(
    served: Served, asked: float | None, leased: float | None
) -> None:
    key = await make_key(served)
    async with working(served) as answered:
        found = await ask(served, key, temperature=asked)
    assert found["choices"][0]["text"] == "1+2="
    assert [(lease.temperature, "temperature" in str(lease.to_bytes())) for lease in answered] == [
        (leased, leased is not None)
    ]


async def test_a_chat_has_its_own_temperature_too(served: Served) -> None:
    key = await make_key(served)
    body = {"model": "swarm", "messages": [], "prompt_token_ids": encode("1+2="), "temperature": 0}
    async with working(served) as answered:
        response = await post(served, key, body, "/v1/chat/completions")
        assert response.status == 200, await response.text()
    assert [lease.temperature for lease in answered] == [0.0]


async def test_prompts_are_answered_in_their_order(served: Served) -> None:
    key = await make_key(served)
    async with working(served) as answered:
        found = await ask(served, key, prompt=["1=", encode("22="), "3="], n=2)
    assert [choice["text"] for choice in found["choices"]] == ["1=", "1=", "22=", "22=", "3=", "3="]
    assert len(answered) == 3


async def test_a_limit_and_a_stop_text_end_an_answer(served: Served) -> None:
    key = await make_key(served)
    async with working(served):
        limited = await ask(served, key, max_tokens=2)
        stopped = await ask(served, key, stop=["2"], logprobs=0, return_token_ids=True)
    assert [(choice["text"], choice["finish_reason"]) for choice in limited["choices"]] == [("1+", "length")]
    (choice,) = stopped["choices"]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("1+", "stop", encode("1+2"))


async def test_a_stream_ends_with_usage_and_done(served: Served) -> None:
    key = await make_key(served)
    body = {"model": "swarm", "prompt": "1=", "stream": True, "stream_options": {"include_usage": True}}
    async with working(served):
        response = await post(served, key, body)
        text = await response.text()
    assert response.content_type == "text/event-stream"
    *events, last = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert last == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "1="
    assert chunks[-1]["usage"]["completion_tokens"] == 3


def reported(served: Served, key: NodeKey, lease: Lease, said: list[int], start: int = 0, previous: str = "") -> bytes:
    """A fragment with these tokens of the first sample, the first of which is number `start`."""
    part = FragmentPart(
        sample=0, start=start, tokens=pack_tokens(said), logprobs=pack_logprobs([-0.5] * len(said)), finish=""
    )
    fields = {"round_id": served.round.round_id, "lease_id": lease.lease_id, "lease_digest": lease.digest}
    return key.seal("fragment", Fragment(**fields, previous=previous, parts=(part,)).to_bytes())


async def report(served: Served, key: NodeKey, *envelopes: bytes) -> None:
    reply = await served.call(
        key, "/v1/leases/progress", LeaseProgress(held=(), fragments=envelopes), LeaseProgressReply
    )
    assert len(reply.taken) == len(envelopes)


async def the_lease_of_a_query(served: Served, node: NodeKey) -> Lease:
    """Lease until the query is there; other groups are returned."""
    while True:
        for lease in await served.lease(node, groups=4):
            if len(unpack_tokens(lease.prompt)) < len("47+38="):
                return lease
        await asyncio.sleep(0.01)  # until the request has arrived


async def next_event(response: ClientResponse) -> Any:
    """The next event of a stream; comments are left out."""
    while line := await response.content.readline():
        if line.startswith(b"data: "):
            return line[6:].strip().decode() if b"[DONE]" in line else json.loads(line[6:])
    return None


async def test_the_text_of_a_stream_comes_while_it_is_sampled(served: Served) -> None:
    key, node = await make_key(served), await served.join(1)
    await served.call(node, "/v1/heartbeat", BEAT, HeartbeatReply)
    body = {
        "model": "swarm",
        "prompt": "1+2=",
        "stream": True,
        "logprobs": 0,
        "stream_options": {"include_usage": True},
    }
    asking = asyncio.create_task(post(served, key, body))
    lease = await the_lease_of_a_query(served, node)
    assert lease.report_every_ms > 0
    first = reported(served, node, lease, encode("1+"))
    await report(served, node, first)
    response = await asking
    begin, part = await next_event(response), await next_event(response)
    assert begin["choices"][0]["text"] == ""
    (choice,) = part["choices"]
    assert (choice["text"], choice["finish_reason"], choice["receipt"]) == ("1+", None, "")
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * 2
    previous = digest(Envelope.from_bytes(first).payload)
    await report(served, node, reported(served, node, lease, encode("2"), 2, previous))
    part = await next_event(response)
    assert (part["choices"][0]["text"], part["choices"][0]["logprobs"]["text_offset"]) == ("2", [2])
    await served.submit(node, echoed(served, node, lease))
    last, usage, end = [await next_event(response) for _ in range(3)]
    (choice,) = last["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("=", "stop")
    rows = await served.round.database.read(lambda connection: connection.execute(tables.rollouts.select()).all())
    assert [choice["receipt"]] == [row.claim_id for row in rows]
    assert (usage["usage"]["completion_tokens"], end) == (5, "[DONE]")


async def test_an_answer_that_differs_from_what_was_read_ends_the_stream_with_an_error(served: Served) -> None:
    """The first node reported other tokens than the second one draws: its version, or its honesty, was another."""
    key, first, second = await make_key(served), await served.join(1), await served.join(2)
    for node in (first, second):
        await served.call(node, "/v1/heartbeat", BEAT, HeartbeatReply)
    asking = asyncio.create_task(post(served, key, {"model": "swarm", "prompt": "1+2=", "stream": True}))
    lease = await the_lease_of_a_query(served, first)
    await report(served, first, reported(served, first, lease, encode("9")))
    response = await asking
    await next_event(response)
    assert (await next_event(response))["choices"][0]["text"] == "9"
    returned = ReturnLeases(lease_ids=(lease.lease_id,))
    await served.call(first, "/v1/leases/return", returned, HeartbeatReply)
    again = await the_lease_of_a_query(served, second)
    assert (again.seed, again.prefixes) == (lease.seed, ())
    await served.submit(second, echoed(served, second, again))
    assert (await next_event(response))["error"]["code"] == "answer_changed"
    assert await next_event(response) is None, "the stream has ended"


async def test_a_sample_with_calls_is_sent_in_one_piece(served: Served) -> None:
    key, node = await make_key(served), await served.join(1)
    await served.call(node, "/v1/heartbeat", BEAT, HeartbeatReply)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    body = {"model": "swarm", "messages": [], "prompt_token_ids": encode("1+2="), "stream": True, "tools": [tool]}
    asking = asyncio.create_task(post(served, key, body, "/v1/chat/completions"))
    lease = await the_lease_of_a_query(served, node)
    assert lease.report_every_ms == 0
    await report(served, node, reported(served, node, lease, encode("1")))
    await served.submit(node, echoed(served, node, lease))
    response = await asking
    _, whole = await next_event(response), await next_event(response)
    assert whole["choices"][0]["delta"]["content"] == "1+2="
    assert await next_event(response) == "[DONE]"


async def test_a_chat_without_a_template_is_refused_by_name(served: Served) -> None:
    key = await make_key(served)
    body = {"model": "swarm", "messages": [{"role": "user", "content": "1+2="}]}
    response = await post(served, key, body, "/v1/chat/completions")
    found = await response.json()
    assert response.status == 422
    assert "no chat template" in found["error"]["message"]


async def test_a_chat_may_be_exact_to_the_token(served: Served) -> None:
    """The messages beside the tokens are not rendered: this policy has no template."""
    key = await make_key(served)
    body = {
        "model": "swarm",
        "messages": [{"role": "user", "content": "anything"}],
        "prompt_token_ids": encode("1+2="),
        "return_token_ids": True,
    }
    async with working(served):
        response = await post(served, key, body, "/v1/chat/completions")
        found = await response.json()
    assert found["prompt_token_ids"] == encode("1+2=")
    (choice,) = found["choices"]
    assert choice["message"]["content"] == "1+2="
    assert choice["token_ids"] == [*encode("1+2="), END_TOKEN]


@pytest.mark.parametrize(
    ("fields", "status", "code", "says"),
    [
        ({"model": "gpt-9"}, 404, "not_found", "Models: swarm"),
        ({"model": "swarm@7"}, 404, "not_found", "Models: swarm"),
        ({"temperature": 3}, 400, "field_refused", "temperature"),
        ({"temperature": -1}, 400, "field_refused", "temperature"),
        ({"temperature": True}, 400, "malformed_message", "temperature"),
        ({"temperature": "0"}, 400, "malformed_message", "temperature"),
        ({"temperature": float("nan")}, 400, "malformed_message", "NaN"),
        ({"top_p": 0.5}, 400, "field_refused", "top_p"),
        ({"prompt": [999]}, 400, "field_refused", "vocabulary"),
        ({"prompt": ""}, 400, "malformed_message", "prompt"),
        ({"n": 0}, 400, "field_refused", "n"),
        ({"maxtokens": 3}, 400, "field_refused", "max_tokens"),
    ],
)
async def test_what_cannot_be_answered_is_refused_by_name(
    served: Served, fields: dict[str, Any], status: int, code: str, says: str
) -> None:
    key = await make_key(served)
    found, error = await refused(served, key, **fields)
    assert (found, error["code"]) == (status, code), error
    assert says in error["message"]


async def test_a_prompt_leaves_room_for_the_longest_completion_of_the_round(served: Served) -> None:
    """Engines refuse a prompt without that room, however few tokens are asked for."""
    key = await make_key(served)
    (await served.round.policy.text()).positions = 10
    status, error = await refused(served, key, prompt="10+2=", max_tokens=1)
    assert (status, error["code"], error["param"]) == (400, "field_refused", "prompt")
    assert "5 tokens" in error["message"]
    async with working(served):
        assert (await ask(served, key, prompt="1+2=", max_tokens=1))["choices"][0]["text"] == "1"


async def test_a_key_is_needed_and_its_budget_kept(served: Served) -> None:
    poor = await make_key(served, budget_micros=5)
    assert (await refused(served, "es-unknown"))[1]["code"] == "key_refused"
    response = await served.client.post("/v1/completions", data=b"{}")
    assert (response.status, (await response.json())["error"]["type"]) == (401, "authentication_error")
    status, error = await refused(served, poor, n=64)
    assert (status, error["code"]) == (429, "key_budget_used")


async def test_a_body_that_is_dear_to_read_is_not_read_without_a_key(served: Served) -> None:
    """Decoding it, and finding the tokens of its text, costs fifty times what looking up the key costs."""
    dear = b'{"model": "swarm", "prompt": [%s]}' % b", ".join([b"[1]"] * 2000)
    for key, code in (("es-unknown", "key_refused"), (await make_key(served), "message_too_large")):
        response = await post(served, key, dear)
        assert (await response.json())["error"]["code"] == code


async def test_the_models_are_the_versions_that_nodes_hold(served: Served) -> None:
    key = await make_key(served)
    headers = {"Authorization": f"Bearer {key}"}
    async with working(served):
        await ask(served, key)
        found = await (await served.client.get("/v1/models", headers=headers)).json()
        assert {model["id"]: model["version"] for model in found["data"]} == {"swarm": 1, "swarm@1": 1}
        assert (await ask(served, key, model="swarm@1"))["version"] == 1


async def test_a_model_is_found_by_each_name_that_a_query_may_have(served: Served) -> None:
    key = await make_key(served)
    headers = {"Authorization": f"Bearer {key}"}
    async with working(served):
        listed = (await (await served.client.get("/v1/models", headers=headers)).json())["data"]
        for model in listed:
            response = await served.client.get(f"/v1/models/{model['id']}", headers=headers)
            assert (response.status, await response.json()) == (200, model)
        response = await served.client.get("/v1/models/swarm%401", headers=headers)
        assert (await response.json())["id"] == "swarm@1"
    for name in ("swarm@9", "openai/swarm", "x"):
        response = await served.client.get(f"/v1/models/{name}", headers=headers)
        assert (response.status, (await response.json())["error"]["code"]) == (404, "not_found"), name
    response = await served.client.get("/v1/models/swarm")
    assert (response.status, (await response.json())["error"]["code"]) == (401, "key_refused")


async def test_a_request_may_have_a_priority_and_a_highest_price(served: Served) -> None:
    key, most = await make_key(served), limits.PRICE_MAX_MICROS_PER_MTOK
    async with working(served):
        await ask(served, key, priority=-3, max_price_micros_per_mtok=most)
        await ask(served, key, priority=None)
    (first, second) = await served.round.database.read(lambda there: there.execute(tables.queries.select()).all())
    assert [(row.priority, row.max_price) for row in (first, second)] == [(-3, most), (0, None)]
    for fields in ({"priority": 10**7}, {"max_price_micros_per_mtok": -1}):
        status, error = await refused(served, key, **fields)
        assert (status, error["code"], error["param"]) == (400, "field_refused", next(iter(fields)))


async def test_the_clients_priority_and_highest_price_are_those_of_its_queries(served: Served) -> None:
    key, most = await make_key(served), 3_000_000
    with Swarm(str(served.client.make_url("/")), key) as swarm:
        async with working(served):
            await asyncio.to_thread(swarm.sample, ["1+2="], priority=-3, max_price_micros_per_mtok=most)
            await asyncio.to_thread(swarm.sample, ["1+2="], priority=0)
    rows = await served.round.database.read(lambda connection: connection.execute(tables.queries.select()).all())
    assert [(row.priority, row.max_price) for row in rows] == [(-3, most), (0, None)]


async def test_a_caller_that_leaves_withdraws_its_queries(served: Served) -> None:
    key = await make_key(served)
    waiting = asyncio.create_task(ask(served, key))
    await until(served, ["open"])
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    await until(served, ["withdrawn"])


async def until(served: Served, wanted: list[str]) -> None:
    """Wait until the states of all queries are these."""
    while await queries(served) != wanted:  # noqa: ASYNC110 - another process might as well have changed them
        await asyncio.sleep(0.01)


async def queries(served: Served) -> list[str]:
    """The states of all queries."""
    rows = await served.round.database.read(lambda connection: connection.execute(tables.queries.select()).all())
    return [row.state for row in rows]


async def test_nobody_answers(tmp_path: Path) -> None:
    async with serve(tmp_path, bounds=Bounds(query_s=0.05, query_alive_s=0.01)) as served:
        await served.publish()
        key = await make_key(served)
        status, error = await refused(served, key)
        assert (status, error["code"], error["type"]) == (503, "unreachable", "server_error")
        response = await post(served, key, {"model": "swarm", "prompt": "1+2=", "stream": True})
        text = await response.text()
        assert text.startswith(": the nodes")
        assert '"code":"unreachable"' in text
        assert await queries(served) == ["withdrawn"] * 2


async def idling(served: Served, *nodes: NodeKey) -> list[asyncio.Task[tuple[Lease, ...]]]:
    """Let the nodes answer all groups for training, each one at least; return their next requests, which are held."""
    for node in nodes:
        (lease,) = await served.lease(node)
        await served.submit(node, served.answer(node, lease))
    return [await next_held(served, node) for node in nodes]


async def next_held(served: Served, node: NodeKey) -> asyncio.Task[tuple[Lease, ...]]:
    """Let a node answer all groups; return its next request, which is held."""
    others = len(served.round.waiting.idle_nodes)
    while True:
        asked = asyncio.create_task(served.lease(node))
        while not asked.done() and len(served.round.waiting.idle_nodes) == others:  # noqa: ASYNC110 - it is on its way
            await asyncio.sleep(0.01)
        if not asked.done():
            return asked
        for lease in await asked:
            await served.submit(node, served.answer(node, lease))


@asynccontextmanager
async def writer_is_held(served: Served) -> AsyncIterator[None]:
    """The store's writer waits for the end of the block."""
    free, begun = threading.Event(), threading.Event()

    def waits(_connection: sa.Connection) -> None:
        begun.set()
        free.wait(60)

    held = asyncio.create_task(served.round.database.run(waits))
    await asyncio.to_thread(begun.wait)
    try:
        yield
    finally:
        free.set()
        await held


@contextmanager
def commits(served: Served) -> Iterator[list[str]]:
    """The commits of the round's store during the block."""
    seen: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        seen.extend([statement] if statement == "COMMIT" else [])

    engine = served.round.database._engine
    sa.event.listen(engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        sa.event.remove(engine, "before_cursor_execute", note)


async def test_a_query_and_the_lease_of_an_idle_node_are_one_commit(patient: Served) -> None:
    key, node = await make_key(patient), await patient.join()
    (idle,) = await idling(patient, node)
    with commits(patient) as seen:
        waiting = asyncio.create_task(ask(patient, key))
        (lease,) = await idle
    assert len(seen) == 1
    await patient.submit(node, echoed(patient, node, lease))
    assert (await waiting)["choices"][0]["text"] == "1+2="


async def test_the_queries_of_a_request_go_to_as_many_idle_nodes(patient: Served) -> None:
    key, nodes = await make_key(patient), [await patient.join(number) for number in (1, 2)]
    idle = await idling(patient, *nodes)
    with commits(patient) as seen:
        waiting = asyncio.create_task(ask(patient, key, prompt=["1=", "2="]))
        leases = await asyncio.gather(*idle)
    assert [(len(each), len(seen)) for each in leases] == [(1, 1)] * 2
    for node, (lease,) in zip(nodes, leases, strict=True):
        await patient.submit(node, echoed(patient, node, lease))
    assert [choice["text"] for choice in (await waiting)["choices"]] == ["1=", "2="]


async def test_of_two_queries_that_come_at_once_an_idle_node_gets_one_and_then_the_other(patient: Served) -> None:
    key, node = await make_key(patient), await patient.join()
    (idle,) = await idling(patient, node)
    async with writer_is_held(patient):
        waiting = [asyncio.create_task(ask(patient, key, prompt=f"{digit}=")) for digit in (1, 2)]
        while patient.round.database.waiting < 2:  # noqa: ASYNC110 - both are on their way
            await asyncio.sleep(0.01)
    for leases in (await idle, await patient.lease(node)):
        (lease,) = leases
        await patient.submit(node, echoed(patient, node, lease))
    assert [(await each)["choices"][0]["text"] for each in waiting] == ["1=", "2="]


async def test_a_refused_query_leaves_the_idle_node_where_it_was(patient: Served) -> None:
    node = await patient.join()
    (idle,) = await idling(patient, node)
    poor = await make_key(patient, budget_micros=1)
    for key, status in (("es-guessed", 401), (poor, 429)):
        assert (await refused(patient, key))[0] == status
    assert len(patient.round.waiting.idle_nodes) == 1
    rich = await patient.round.database.run(api_keys.make, "rich", 10**6, now_ms=now_ms())
    waiting = asyncio.create_task(ask(patient, rich))
    (lease,) = await idle
    await patient.submit(node, echoed(patient, node, lease))
    assert (await waiting)["choices"][0]["text"] == "1+2="


async def test_a_query_whose_idle_node_hangs_up_meanwhile_goes_to_the_next(patient: Served) -> None:
    key, nodes = await make_key(patient), [await patient.join(number) for number in (1, 2)]
    gone, stays = await idling(patient, *nodes)
    async with writer_is_held(patient):
        waiting = asyncio.create_task(ask(patient, key))
        while patient.round.database.waiting < 1:  # noqa: ASYNC110 - it is on its way
            await asyncio.sleep(0.01)
        gone.cancel()
        while len(patient.round.waiting.idle_nodes) > 1:  # noqa: ASYNC110 - its server has to see it
            await asyncio.sleep(0.01)
    (lease,) = await stays
    await patient.submit(nodes[1], echoed(patient, nodes[1], lease))
    assert (await waiting)["choices"][0]["text"] == "1+2="


async def test_hundreds_of_callers_are_answered_at_once(served: Served) -> None:
    key, url = await make_key(served, 10**9), served.client.make_url("/v1/completions")
    headers = {"Authorization": f"Bearer {key}"}

    async def digit(session: ClientSession, number: int) -> str:
        body = {"model": "swarm", "prompt": f"{number % 10}="}
        while True:
            async with session.post(url, json=body, headers=headers) as response:
                found = await response.json()
                if response.status == 200:
                    return str(found["choices"][0]["text"])
            assert found["error"]["code"] == "overloaded", found
            await asyncio.sleep(int(response.headers["Retry-After"]))

    async with ClientSession(connector=TCPConnector(limit=0)) as session, working(served, 1), working(served, 2):
        found = await asyncio.gather(*(digit(session, number) for number in range(300)))
    assert found == [f"{number % 10}=" for number in range(300)]
    assert set(await queries(served)) == {"answered"}
