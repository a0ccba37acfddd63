"""Routes of public data: leaderboard, status, trust metadata and chunks. `/metrics` adds this process's HTTP times.

- Requests are counted by the pattern of their route, so that no client creates new time series.
- HTTP times are of this process since its start; the other figures come from the store.
"""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from aiohttp import web
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from coordinator.api.http import ROUND, Handler, reply, require_operator
from coordinator.api.snapshot import PageSnapshot
from coordinator.api.watch import WATCH
from coordinator.base.clock import now_ms
from coordinator.publishing.mirror import IMMUTABLE
from coordinator.reports import metrics, summary
from coordinator.transactions import evaluations, policy_versions, standings, suite_runs
from ledger import store
from protocol.errors import NotFound, UnknownChunk
from protocol.ids import ChunkId
from protocol.policy.origin import OriginList, chunk_path, may_change

routes = web.RouteTableDef()

LEADERBOARD = web.AppKey("leaderboard", PageSnapshot[bytes])
STATUS = web.AppKey("status", PageSnapshot[bytes])
OPERATOR_STATUS = web.AppKey("operator_status", PageSnapshot[bytes])
BROADCAST = web.AppKey("broadcast", PageSnapshot[bytes])
EVALUATIONS = web.AppKey("evaluations", PageSnapshot[bytes])
SAMPLES = web.AppKey("samples", PageSnapshot[bytes])

FRESH_S = 0.5
"""Maximum age of the data: scripts read it every few seconds, and nodes do not depend on it."""

OTHERS_MAX = 1_000
"""Limit of nodes without a claim on `/v1/leaderboard`: verifiers read all of it, and registering is free."""


@routes.get("/v1/leaderboard")
async def leaderboard(request: web.Request) -> web.Response:
    """Return the credit of each node by the first `ledger_size` entries of the ledger, and each owner's trust."""
    return await _shared(request, LEADERBOARD)


@routes.get("/v1/status")
async def status(request: web.Request) -> web.Response:
    """Return the state of the round, and whether and why the learner waits."""
    return await _shared(request, STATUS)


@routes.get("/v1/operator/status")
async def operator_status(request: web.Request) -> web.Response:
    """Return the status with the number of claims that wait for an auditor."""
    require_operator(request)
    return await _shared(request, OPERATOR_STATUS)


@routes.get("/v1/broadcast")
async def broadcast(request: web.Request) -> web.Response:
    """Return how the last version spread, node by node."""
    return await _shared(request, BROADCAST)


def share(app: web.Application) -> None:
    """Set up the shared figures: each is computed once for all clients, outside the writer, as the bytes to send."""
    round_ = app[ROUND]

    def shared(look: Callable[[sa.Connection, int, int], dict[str, Any]]) -> PageSnapshot[bytes]:
        def read(connection: sa.Connection) -> bytes:
            moment_ms = now_ms()
            figures = look(connection, moment_ms - round_.silent_after_ms, moment_ms)
            return json.dumps({"as_of_ms": moment_ms} | figures).encode()

        made = PageSnapshot(lambda: round_.database.read(read), fresh_s=FRESH_S, shown_at_most_s=FRESH_S)
        app.on_cleanup.append(lambda _app: made.close())
        return made

    app[LEADERBOARD] = shared(
        lambda conn, _since_ms, _now_ms: {
            "ledger_size": store.size(conn),
            "nodes": summary.leaderboard(conn, OTHERS_MAX),
            "owners": standings.list_standings(conn, round_.audits.settings),
        },
    )
    settings = round_.public_settings()
    app[STATUS] = shared(
        lambda conn, since_ms, now_ms: (
            summary.explained(conn, config=round_.config, alive_since_ms=since_ms, now_ms=now_ms) | settings
        )
    )
    app[OPERATOR_STATUS] = shared(
        lambda conn, since_ms, now_ms: (
            summary.for_operator(conn, config=round_.config, alive_since_ms=since_ms, now_ms=now_ms) | settings
        )
    )
    app[BROADCAST] = shared(lambda conn, since_ms, _now_ms: summary.broadcast(conn, alive_since_ms=since_ms))
    app[EVALUATIONS] = shared(
        lambda conn, _since_ms, _now_ms: {
            "evaluations": evaluations.list_evaluations(conn),
            "suites": suite_runs.list_runs(conn),
        }
    )

    async def read_samples() -> bytes:
        made = [evaluation.model_dump() for evaluation in await app[WATCH].samples()]
        return json.dumps({"as_of_ms": now_ms(), "evaluations": made}).encode()

    app[SAMPLES] = PageSnapshot(read_samples)
    app.on_cleanup.append(lambda _app: app[SAMPLES].close())


@routes.get("/v1/evaluations")
async def measured(request: web.Request) -> web.Response:
    """Return every evaluation by the nodes, and the imported results of other suites, each the oldest first."""
    return await _shared(request, EVALUATIONS)


@routes.get("/v1/evaluations/samples")
async def samples(request: web.Request) -> web.Response:
    """Return prompts, completions and rewards of evaluations, newest first, if the round publishes them."""
    if not request.app[WATCH].publishes_samples:
        raise NotFound(
            "This round does not publish samples of its evaluations.",
            hint="The operator can set eval.publish_samples, and launch the round again.",
        )
    return await _shared(request, SAMPLES)


async def _shared(request: web.Request, key: web.AppKey[PageSnapshot[bytes]]) -> web.Response:
    body = await aged(request.app[key])
    return web.Response(body=body, content_type="application/json", headers={"Cache-Control": "no-store"})


async def aged(figures: PageSnapshot[bytes]) -> bytes:
    """Return the newest figures as JSON, with their age at the time of sending."""
    body = (await figures.get()).figures
    return b'{"age_s": %.1f, ' % figures.age_s() + body.removeprefix(b"{")


@routes.get("/v1/owners/{owner:.{1,100}}/rates")
async def rates(request: web.Request) -> web.Response:
    """Return the earnings of an owner's nodes in the last hour and day, and what the owner was paid."""
    figures = (await request.app[WATCH].rates.get()).figures
    owner = request.match_info["owner"]
    if owner not in figures.nodes:
        raise NotFound("No node of this owner has joined this round.")
    unit = request.app[ROUND].config.round.money.to_json()
    return web.json_response(figures.to_json(owner) | {"unit": unit}, headers={"Cache-Control": "no-store"})


@routes.get("/v1/origins")
async def origins(request: web.Request) -> web.Response:
    """Return the list of plain servers that have copies of the public files."""
    return reply(OriginList(urls=request.app[ROUND].config.publish.origins))


@routes.get("/v1/metadata/{name}")
async def metadata(request: web.Request) -> web.Response:
    """Return a document of the trust metadata."""
    name = request.match_info["name"]
    data = await asyncio.to_thread(request.app[ROUND].metadata.read, name)
    if data is None:
        raise NotFound(f"There is no trust document named {name[:100]}.")
    caching = "no-store" if may_change(name) else IMMUTABLE
    return web.Response(body=data, content_type="application/octet-stream", headers={"Cache-Control": caching})


@routes.get("/v1/chunks/{start:[0-9a-f]{2}}/{chunk:[0-9a-f]{64}}")
async def chunk(request: web.Request) -> web.Response:
    """Return a chunk by the hash of its bytes."""
    name = ChunkId(request.match_info["chunk"])
    if request.path != f"/v1/{chunk_path(name)}":
        raise NotFound(f"There is nothing at {request.path[:100]}.")
    data = await asyncio.to_thread(request.app[ROUND].publisher.read_chunk, name)
    if data is None:
        raise UnknownChunk("The origin does not have this chunk.", hint="Refresh: it may belong to an older version.")
    return web.Response(body=data, content_type="application/octet-stream", headers={"Cache-Control": IMMUTABLE})


@routes.get("/healthz")
async def healthz(request: web.Request) -> web.Response:
    """Return 200 if the store accepts writes."""
    await request.app[ROUND].database.run_for_node(policy_versions.newest_version)  # waits for the writer
    return web.Response(text="ok\n")


REGISTRY = web.AppKey("registry", CollectorRegistry)
ANSWERED = web.AppKey("answered", Histogram)

BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0)
"""Bounds of the histogram, up to the longest time that a request is held open."""


def measure(app: web.Application) -> None:
    """Record the count and time of every reply of `app`."""
    app[REGISTRY] = CollectorRegistry()
    ProcessCollector(namespace="echo_swarm", registry=app[REGISTRY])
    app[ANSWERED] = Histogram(
        "echo_swarm_http_seconds",
        "Time to answer a request.",
        ["method", "route", "status"],
        buckets=BUCKETS_S,
        registry=app[REGISTRY],
    )
    app.middlewares.insert(0, _timed)


@web.middleware
async def _timed(request: web.Request, handler: Handler) -> web.StreamResponse:
    began = time.perf_counter()
    response = await handler(request)
    resource = request.match_info.route.resource
    route = resource.canonical if resource is not None else "none"
    known = request.method if request.method in ("GET", "HEAD", "POST", "PUT") else "other"
    request.app[ANSWERED].labels(known, route, str(response.status)).observe(time.perf_counter() - began)
    return response


@routes.get("/metrics")
async def exposition(request: web.Request) -> web.Response:
    """Return the figures of the round and of this process for Prometheus; more with the operator's token."""
    asked = STATUS
    if "Authorization" in request.headers:
        require_operator(request)
        asked = OPERATOR_STATUS
    status = json.loads(await aged(request.app[asked]))
    body = metrics.exposition(status) + generate_latest(request.app[REGISTRY])
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4, "Cache-Control": "no-store"})
