"""The bench of the endpoint: what callers count, and how long a node had a query."""

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.endpoint.__main__ import own_seconds
from bench.endpoint.callers import Endpoint, call


async def answered(statuses: list[int]) -> tuple[int, int, int]:
    """Serve these statuses, and return how many answers, tokens and refusals two requests count."""

    async def complete(request: web.Request) -> web.Response:
        status = statuses.pop(0)
        headers = {"Retry-After": "0"} if status == 503 else {}
        return web.json_response({"usage": {"completion_tokens": 7}}, status=status, headers=headers)

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    async with TestServer(app) as server:
        endpoint = Endpoint(str(server.make_url("/v1")), "key")
        called = await asyncio.to_thread(call, endpoint, range(2), tokens=3)
    return len(called.seconds), called.tokens, called.refused


@pytest.mark.asyncio
async def test_a_caller_comes_back_when_the_server_is_busy() -> None:
    assert await answered([503, 200, 503, 503, 200]) == (2, 14, 3)


@pytest.mark.asyncio
async def test_an_error_ends_the_bench() -> None:
    with pytest.raises(ExceptionGroup):
        await answered([200, 500])


def test_a_node_has_a_query_from_its_engine_to_its_submission(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    events = [
        {"kind": "lease", "began": 0.0, "ended": 1.0, "leases": 2},
        {"kind": "sample", "began": 1.0, "ended": 1.5, "lease": "a"},
        {"kind": "sample", "began": 2.0, "ended": 2.5, "lease": "b"},
        {"kind": "submit", "began": 4.0, "ended": 5.0, "answered": ["a", "b", "older"]},
    ]
    record.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert own_seconds(record) == [3.0, 2.0]
