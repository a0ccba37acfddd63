"""Routes for appeals: nodes and owners submit them; the operator's commands list them and rule on them."""

from typing import Annotated

from aiohttp import web
from pydantic import Field, StringConstraints

from coordinator.api.http import ROUND, body, read_json, reply, reply_json, require_operator
from coordinator.base.clock import now_ms
from coordinator.config.section import Section
from coordinator.transactions import appeals
from coordinator.transactions.appeals import SAID_MAX_CHARS, Ruled
from ledger.entry import ReasonCode
from protocol import limits

routes = web.RouteTableDef()

_Words = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f]*$")]


class RulingRequest(Section):
    """The operator's ruling on an appeal, with its reason and its author."""

    number: int = Field(ge=1, lt=2**31)
    outcome: Ruled
    reason_code: ReasonCode
    said: _Words = Field(max_length=SAID_MAX_CHARS)
    given_by: _Words = Field(min_length=1, max_length=100)


@routes.post("/v1/appeals")
async def appeal(request: web.Request) -> web.Response:
    """Record a signed appeal against a fault or a ban. Anyone may deliver it, and repeating it is harmless."""
    round_ = request.app[ROUND]
    round_.database.require_room()
    envelope = await body(request, limits.APPEAL_MAX_BYTES)
    taken = await round_.database.run_for_node(
        appeals.record_appeal, envelope, round_id=round_.round_id, now_ms=now_ms()
    )
    return reply(taken)


@routes.get("/v1/operator/appeals")
async def listed(request: web.Request) -> web.Response:
    """Return all appeals, waiting ones first."""
    return reply_json(await require_operator(request).database.read(appeals.listed))


@routes.get("/v1/operator/appeals/{number:[0-9]{1,9}}")
async def shown(request: web.Request) -> web.Response:
    """Return an appeal with its evidence and the amount that granting it would pay."""
    round_ = require_operator(request)
    return reply_json(
        await round_.database.read(appeals.appeal_report, int(request.match_info["number"]), round_.audits.settings)
    )


@routes.post("/v1/operator/rulings")
async def rule(request: web.Request) -> web.Response:
    """Grant or deny an appeal, with a reason code."""
    round_ = require_operator(request)
    wanted = await read_json(request, RulingRequest, "ruling")
    done = await round_.database.run(
        appeals.rule,
        wanted.number,
        wanted.outcome,
        wanted.reason_code,
        wanted.said,
        given_by=wanted.given_by,
        audit=round_.audits.settings,
        now_ms=now_ms(),
    )
    return reply_json(done)
