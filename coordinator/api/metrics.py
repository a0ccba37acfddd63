"""`/metrics`: the round's figures, and what this process has answered.

- Routes are counted by their pattern, so that no caller makes new time series.
- What was answered is this process's own word since its start; the figures are the store's.
"""

import json
import time

from aiohttp import web
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from coordinator.api.http import Handler
from coordinator.api.public import STATUS, aged
from coordinator.figures import metrics

routes = web.RouteTableDef()

REGISTRY = web.AppKey("registry", CollectorRegistry)
ANSWERED = web.AppKey("answered", Histogram)

BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0)
"""Up to the longest that a question is held open."""


def measure(app: web.Application) -> None:
    """Count and time every answer of this application."""
    app[REGISTRY] = CollectorRegistry()
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
    """Figures of the round and of this process, for Prometheus."""
    status = json.loads(await aged(request.app[STATUS]))
    body = metrics.exposition(status) + generate_latest(request.app[REGISTRY])
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4, "Cache-Control": "no-store"})
