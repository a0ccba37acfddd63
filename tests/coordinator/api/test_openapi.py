"""The description of the API is true: every route is in it, and asked by it the server never fails."""

import asyncio
from collections.abc import Iterator
from threading import Thread
from typing import Any

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
    nodes,
    openapi,
    operator,
    pages,
    probes,
    public,
    stats,
    trainers,
    watch,
)
from tests.coordinator.served import serve

ROOMS = (
    *(nodes, ledger, public, pages, install, watch, stats, probes, appeals, completions),
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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A coordinator with one version, in a thread with a loop of its own: who asks here asks synchronously."""
    loop = asyncio.new_event_loop()
    ready: asyncio.Future[str] = loop.create_future()
    ended = asyncio.Event()

    async def run() -> None:
        async with serve(tmp_path_factory.mktemp("openapi")) as served:
            await served.publish()
            ready.set_result(str(served.client.make_url("")).rstrip("/"))
            await ended.wait()

    thread = Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()

    async def url() -> str:
        return await ready

    yield asyncio.run_coroutine_threadsafe(url(), loop).result(timeout=60)
    loop.call_soon_threadsafe(ended.set)
    thread.join()
    loop.close()


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
