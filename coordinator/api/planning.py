"""What `swarm-coordinator plan --live` asks of a running round, with the operator's token."""

from dataclasses import asdict
from typing import Any

import sqlalchemy as sa
from aiohttp import web

from coordinator.api.http import reply_json, require_operator
from coordinator.clock import now_ms
from coordinator.fleet import activation
from coordinator.round import Round

routes = web.RouteTableDef()


@routes.get("/v1/measured")
async def measured(request: web.Request) -> web.Response:
    """The load, and each node's rate and cost, as the fleet sees them."""
    here = require_operator(request)
    return reply_json(await here.database.read(_measured, here, now_ms()))


def _measured(connection: sa.Connection, here: Round, moment_ms: int) -> dict[str, Any]:
    load = activation.load(connection, here.config, alive_since_ms=moment_ms - here.silent_after_ms)
    nodes = activation.candidates(connection, here.config, silent_after_ms=here.silent_after_ms, now_ms=moment_ms)
    return {
        "load": asdict(load) if load else None,
        "publish_every": here.config.staleness.publish_every,
        "gamma": here.config.fleet.gamma,
        "nodes": [{"name": one.name, "groups_per_s": one.rate, "cost_micros_per_s": one.cost} for one in nodes],
    }
