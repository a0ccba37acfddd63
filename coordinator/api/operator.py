"""Routes for the operator's commands, with the operator's token: nodes, versions, and `plan --live`."""

from dataclasses import asdict
from functools import partial
from typing import Any

import sqlalchemy as sa
from aiohttp import web
from pydantic import Field

from coordinator.api.http import asked_days, read_json, reply_json, require_operator
from coordinator.api.learner import finish_round
from coordinator.base.clock import now_ms
from coordinator.config.section import Section
from coordinator.reports import moderation
from coordinator.reports.audit_record import LISTED_MAX, audit_record, recent_audits
from coordinator.service.publication import Replacement, hold_batches
from coordinator.service.round import Round
from coordinator.transactions import api_keys, fleet, retractions
from coordinator.transactions.orders import REASON_MAX_CHARS, Action
from protocol.errors import MalformedMessage, OutOfOrder

routes = web.RouteTableDef()


class Order(Section):
    """The operator's order about a node, with its reason and its author."""

    action: Action
    node: str = Field(min_length=1, max_length=100)
    reason: str = Field(min_length=1, max_length=REASON_MAX_CHARS)
    given_by: str = Field(min_length=1, max_length=100)


@routes.get("/v1/operator/nodes")
async def nodes(request: web.Request) -> web.Response:
    """Return every node with its owner and the orders about it."""
    round_ = require_operator(request)
    return reply_json(await round_.database.read(partial(moderation.listed, alive_since_ms=_alive_since_ms(round_))))


@routes.get("/v1/operator/keys")
async def keys(request: web.Request) -> web.Response:
    """Return every API key's name, budget and usage, and all usage on the last `days`; it reveals no key."""
    round_ = require_operator(request)
    days = asked_days(request)
    listed = await round_.database.read(api_keys.list_keys_and_days, days, now_ms=now_ms())
    return reply_json({**listed, "unit": round_.config.round.money.to_json()})


@routes.get("/v1/operator/nodes/{node:.{1,100}}")
async def node(request: web.Request) -> web.Response:
    """Return a node with its rejected requests and the orders about it."""
    round_ = require_operator(request)
    about = partial(moderation.node_report, alive_since_ms=_alive_since_ms(round_))
    return reply_json(await round_.database.read(about, request.match_info["node"]))


@routes.get("/v1/operator/bans/{node:.{1,100}}")
async def ban_preview(request: web.Request) -> web.Response:
    """Return what a ban of a node's owner would change: nodes, claims voided and kept, leases, and groups."""
    round_ = require_operator(request)
    return reply_json(await round_.database.read(moderation.ban_preview, request.match_info["node"]))


@routes.get("/v1/operator/audits")
async def audits(request: web.Request) -> web.Response:
    """Return the newest audits, of one node if `node` names it; at most `count`."""
    round_ = require_operator(request)
    try:
        count = min(int(request.query.get("count", "20")), LISTED_MAX)
    except ValueError:
        raise MalformedMessage("count is not a number.") from None
    return reply_json(await round_.database.read(recent_audits, request.query.get("node", "")[:100], max(count, 0)))


@routes.get("/v1/operator/audits/{claim:[0-9a-f]{6,64}}")
async def audit(request: web.Request) -> web.Response:
    """Return the audit of a claim: why it was drawn, its verdict and report, and what became of its money."""
    round_ = require_operator(request)
    return reply_json(await round_.database.read(audit_record, request.match_info["claim"]))


def _alive_since_ms(round_: Round) -> int:
    return now_ms() - round_.silent_after_ms


@routes.post("/v1/operator/orders")
async def order(request: web.Request) -> web.Response:
    """Pause or resume a node, or ban or unban its owner, with a reason."""
    round_ = require_operator(request)
    wanted = await read_json(request, Order, "order")
    done: dict[str, Any] = await round_.database.run(
        moderation.order,
        wanted.action,
        wanted.node,
        wanted.reason,
        given_by=wanted.given_by,
        terms=round_.audits,
        now_ms=now_ms(),
    )
    return reply_json(done)


@routes.post("/v1/operator/versions")
async def replace_version(request: web.Request) -> web.Response:
    """Publish an older version's weights, or staged ones, as the next version."""
    round_ = require_operator(request)
    wanted = await read_json(request, Replacement, "order")
    return reply_json(await round_.publication.replace(wanted))


class BatchHold(Section):
    """The time for which no batch is formed; 0: batches are formed again."""

    for_s: float = Field(ge=0, le=retractions.HOLD_MAX_S)


@routes.post("/v1/operator/hold")
async def hold(request: web.Request) -> web.Response:
    """Form no batch for some seconds, for a retraction; return the newest batch."""
    round_ = require_operator(request)
    wanted = await read_json(request, BatchHold, "hold")
    return reply_json({"batch": await round_.database.run(hold_batches, wanted.for_s, now_ms())})


@routes.post("/v1/operator/finish")
async def finish(request: web.Request) -> web.Response:
    """Finish a round whose trainer is not ours; one with a learner ends after its last update."""
    round_ = require_operator(request)
    if not round_.config.learner.external:
        raise OutOfOrder(
            "The learner of this round finishes it after its last update.",
            hint="To end it early, launch it again with a smaller round.max_updates.",
        )
    return reply_json({"changed": await finish_round(round_)})


@routes.get("/v1/measured")
async def measured(request: web.Request) -> web.Response:
    """Return the load, and the rate and cost of each node, as the fleet controller measures them."""
    round_ = require_operator(request)
    return reply_json(await round_.database.read(_measured, round_, now_ms()))


def _measured(connection: sa.Connection, round_: Round, moment_ms: int) -> dict[str, Any]:
    load = fleet.load(connection, round_.config, alive_since_ms=moment_ms - round_.silent_after_ms)
    nodes = fleet.candidates(connection, round_.config, silent_after_ms=round_.silent_after_ms, now_ms=moment_ms)
    return {
        "load": asdict(load) if load else None,
        "publish_every": round_.config.staleness.publish_every,
        "gamma": round_.config.fleet.gamma,
        "nodes": [{"name": node.name, "groups_per_s": node.rate, "cost_micros_per_s": node.cost} for node in nodes],
    }
