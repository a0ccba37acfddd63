"""What auditors call, with the operator's token; and what anybody may draw again."""

import asyncio

from aiohttp import web

from coordinator.api.http import ROUND, body, reply, reply_json, require_operator
from coordinator.base.clock import now_ms
from coordinator.transactions import audits, lottery
from protocol.errors import NotFound
from protocol.work.auditing import Cases, HoldCases, TakeCases, Verdicts

routes = web.RouteTableDef()

CASES_WAIT_S = 10.0
"""How long a request for cases is held open; the auditor asks again after it."""

LOOK_AGAIN_S = 1.0
"""Cases come with every few submissions, and auditing many at once is cheaper than each alone."""


@routes.post("/v1/auditor/take")
async def assign_cases(request: web.Request) -> web.Response:
    """Cases for an auditor."""
    here = require_operator(request)
    message = TakeCases.from_bytes(await body(request))
    deadline = asyncio.get_running_loop().time() + CASES_WAIT_S
    while True:
        found: Cases = await here.database.run(
            audits.assign_cases, message.auditor, message.at_most, terms=here.audits, now_ms=now_ms()
        )
        if found.cases or found.done or asyncio.get_running_loop().time() >= deadline:
            return reply(found)
        await asyncio.sleep(LOOK_AGAIN_S)


@routes.post("/v1/auditor/hold")
async def extend_cases(request: web.Request) -> web.Response:
    """An auditor needs longer for what it has taken."""
    here = require_operator(request)
    message = HoldCases.from_bytes(await body(request))
    await here.database.run(audits.extend_cases, message.auditor, terms=here.audits, now_ms=now_ms())
    return web.Response(status=204)


@routes.post("/v1/auditor/verdicts")
async def verdicts(request: web.Request) -> web.Response:
    """What an auditor found."""
    here = require_operator(request)
    message = Verdicts.from_bytes(await body(request))
    await here.database.run(
        audits.record_verdicts,
        message.verdicts,
        seconds=message.seconds,
        threads=message.threads,
        terms=here.audits,
        now_ms=now_ms(),
    )
    here.batch_ready.set()
    return web.Response(status=204)


@routes.get("/v1/audits/{epoch:[0-9]{1,12}}")
async def draws(request: web.Request) -> web.Response:
    """The lottery of an epoch that is over: every claim and its rate, whose digest stands in the log."""
    here = request.app[ROUND]
    epoch = int(request.match_info["epoch"])
    if not await here.database.read(lottery.is_over, epoch):
        raise NotFound(f"Epoch {epoch} is not over.", hint="Its secret still draws.")
    listed = await here.database.read(lottery.draws, epoch)
    return reply_json([[draw.claim_id, draw.rate_ppm] for draw in listed])
