"""The description of the API is true: every route is in it, and asked by it the server never fails."""

import asyncio
import json
from collections.abc import Iterator
from threading import Thread
from typing import Any, NamedTuple

import httpx
import msgpack
import pytest
import schemathesis
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.core.result import Ok
from schemathesis.schemas import APIOperation

from coordinator.api import (
    appeals,
    auditor,
    completions,
    install,
    learner,
    ledger,
    listing,
    nodes,
    openapi,
    operator,
    pages,
    public,
    stats,
    trainers,
    training,
    watch,
)
from coordinator.api.guard import Bounds
from coordinator.base.clock import now_ms
from coordinator.transactions import api_keys
from protocol.errors import ERRORS
from tests.coordinator.served import serve

ROOMS = (
    *(nodes, ledger, listing, training, public, pages, install, watch, stats, appeals, completions),
    *(learner, auditor, operator, trainers),
)
HELD_OPEN = "/v1/events"
"""An answer that does not end."""


@schemathesis.serializer("application/msgpack", "application/octet-stream")
def packed(_context: object, value: Any) -> bytes:
    """A generated body as bytes: some packed, all of them strange."""
    return value if isinstance(value, bytes) else bytes(msgpack.packb(value, default=str))


def routes() -> list[web.RouteDef]:
    return [route for room in ROOMS for route in room.routes if isinstance(route, web.RouteDef)]


class Served(NamedTuple):
    """A server, and a key to its endpoint."""

    url: str
    key: str


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A coordinator with one version, in a thread with a loop of its own: who asks here asks synchronously.

    There are no nodes, so every query is withdrawn when its caller has waited long enough.
    """
    loop = asyncio.new_event_loop()
    ready: asyncio.Future[Served] = loop.create_future()
    ended = asyncio.Event()
    bounds = Bounds(query_s=0.05, query_alive_s=0.02)

    async def run() -> None:
        async with serve(tmp_path_factory.mktemp("openapi"), bounds=bounds) as served:
            await served.publish()
            key = await served.round.database.run(api_keys.make, "anybody", 10**9, now_ms=now_ms())
            ready.set_result(Served(str(served.client.make_url("")).rstrip("/"), key))
            await ended.wait()

    thread = Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()

    async def made() -> Served:
        return await ready

    yield asyncio.run_coroutine_threadsafe(made(), loop).result(timeout=60)
    loop.call_soon_threadsafe(ended.set)
    thread.join()
    loop.close()


@pytest.fixture(scope="module")
def server(keyed: Served) -> str:
    return keyed.url


def test_every_route_is_described_with_what_it_says() -> None:
    described = openapi.describe([room.routes for room in ROOMS])
    operations = [operation for methods in described["paths"].values() for operation in methods.values()]
    assert len(operations) == len(routes())
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    assert not [operation["operationId"] for operation in operations if not operation["summary"]]


def test_the_table_of_messages_names_only_routes_that_exist() -> None:
    paths = openapi.describe([room.routes for room in ROOMS])["paths"].keys() | {"/openapi.json"}
    assert {*openapi.SIGNED, *openapi.SAID, *openapi.PRODUCES} <= paths


@given(
    st.lists(st.tuples(st.from_regex(r"/[a-z]{1,4}/", fullmatch=True), st.sampled_from(["", "[0-9]{1,12}", ".{1,6}"])))
)
def test_patterns_with_braces_are_taken_apart(pieces: list[tuple[str, str]]) -> None:
    names = [f"p{number}" for number in range(len(pieces))]
    pattern = "".join(
        f"{text}{{{name}{':' if rule else ''}{rule}}}" for name, (text, rule) in zip(names, pieces, strict=True)
    )
    plain, parameters = openapi._path(pattern)
    assert plain == "".join(f"{text}{{{name}}}" for name, (text, _) in zip(names, pieces, strict=True))
    assert [one["name"] for one in parameters] == names


def test_the_description_is_valid_openapi(server: str) -> None:
    schemathesis.openapi.from_url(f"{server}/openapi.json").validate()


def test_asked_anything_the_server_never_fails(server: str) -> None:
    """Requests within the description, or beside it, get a named error or an answer of the kind described."""
    described = schemathesis.openapi.from_url(f"{server}/openapi.json")

    for result in described.get_all_operations():
        assert isinstance(result, Ok), result
        operation = result.ok()
        if operation.path != HELD_OPEN and not operation.path.startswith("/v1/learner/batches"):
            ask(operation)


def ask(operation: APIOperation[Any, Any, Any, Any]) -> None:
    kinds = operation.definition.raw["responses"]["200"]["content"].keys()

    @given(case=operation.as_strategy())
    @settings(max_examples=4, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def once(case: schemathesis.Case[Any]) -> None:
        answer = case.call()
        assert answer.status_code < 500, (case.as_curl_command(), answer.content)
        assert len(answer.content) < 1_000_000
        if answer.status_code == 200:
            assert {kind.partition(";")[0] for kind in answer.headers["content-type"]} <= kinds

    once()


def test_asked_anything_with_a_key_the_endpoint_answers_or_names_the_error(keyed: Served) -> None:
    """A query that is in order waits for a node, of which there is none here: that is the only failure of ours."""
    described = schemathesis.openapi.from_url(f"{keyed.url}/openapi.json")
    headers = {"Authorization": f"Bearer {keyed.key}"}
    operations = [result.ok() for result in described.get_all_operations() if isinstance(result, Ok)]
    asked = [operation for operation in operations if operation.path in openapi.KEYED]
    assert {operation.path for operation in asked} == {*openapi.KEYED}
    for operation in asked:
        ask_with(headers, operation)
    body = {"model": "swarm", "prompt": [1, 2], "stream": False}
    answer = httpx.post(f"{keyed.url}/v1/completions", json=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unreachable"), "what is in order is queried"


def ask_with(headers: dict[str, str], operation: APIOperation[Any, Any, Any, Any]) -> None:
    kinds = operation.definition.raw["responses"]["200"]["content"].keys()

    @given(case=operation.as_strategy())
    @settings(max_examples=12, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def once(case: schemathesis.Case[Any]) -> None:
        answer = case.call(headers=headers)
        kind = answer.headers["content-type"][0].partition(";")[0]
        if answer.status_code == 200:
            assert kind in kinds
            return
        error = json.loads(answer.content)["error"]
        assert error["code"] in ERRORS, (case.as_curl_command(), error)
        assert error["message"]
        assert answer.status_code < 500 or error["code"] == "unreachable", (case.as_curl_command(), error)
        assert error["code"] != "key_refused"

    once()
