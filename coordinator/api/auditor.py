"""Routes for auditors, with the operator's token; and the public record of each epoch's lottery."""

import asyncio

from aiohttp import web

from coordinator.api.http import body, reply, reply_json, require_operator
from coordinator.api.strangers import read_for_stranger
from coordinator.base.clock import now_ms
from coordinator.transactions import audits, lottery
from protocol.errors import NotFound
from protocol.work.auditing import Cases, HoldCases, TakeCases, Verdicts

routes = web.RouteTableDef()

CASES_WAIT_S = 10.0
"""Longest time a request for cases is held open; the auditor then repeats it."""

LOOK_AGAIN_S = 1.0
"""Time between two looks for cases: auditing several together is cheaper than each alone."""


@routes.post("/v1/auditor/take")
async def assign_cases(request: web.Request) -> web.Response:
    """Assign cases to an auditor; while there are none, hold the request open."""
    round_ = require_operator(request)
    message = TakeCases.from_bytes(await body(request))
    deadline = asyncio.get_running_loop().time() + CASES_WAIT_S
    while True:
        cases: Cases = await round_.database.run(
            audits.assign_cases,
            message.auditor,
            message.at_most,
            message.classes,
            terms=round_.audits,
            now_ms=now_ms(),
        )
        if cases.cases or cases.done or asyncio.get_running_loop().time() >= deadline:
            return reply(cases)
        await asyncio.sleep(LOOK_AGAIN_S)


@routes.post("/v1/auditor/hold")
async def extend_cases(request: web.Request) -> web.Response:
    """Extend the time that an auditor has for its cases."""
    round_ = require_operator(request)
    message = HoldCases.from_bytes(await body(request))
    await round_.database.run(audits.extend_cases, message.auditor, terms=round_.audits, now_ms=now_ms())
    return web.Response(status=204)


@routes.post("/v1/auditor/verdicts")
async def verdicts(request: web.Request) -> web.Response:
    """Record an auditor's verdicts."""
    round_ = require_operator(request)
    message = Verdicts.from_bytes(await body(request))
    await round_.database.run(
        audits.record_verdicts,
        message.verdicts,
        seconds=message.seconds,
        threads=message.threads,
        terms=round_.audits,
        now_ms=now_ms(),
    )
    round_.waiting.batch_ready.set()
    return web.Response(status=204)


@routes.get("/v1/audits/{epoch:[0-9]{1,12}}")
async def draws(request: web.Request) -> web.Response:
    """Return the lottery of a closed epoch: every claim with its audit rate, whose digest is in the log."""
    epoch = int(request.match_info["epoch"])
    if not await read_for_stranger(request, lottery.is_over, epoch):
        raise NotFound(f"Epoch {epoch} is not over.", hint="Its secret is still in use. Try again when it is revealed.")
    listed = await read_for_stranger(request, lottery.draws, epoch)
    return reply_json([[draw.claim_id, draw.rate_ppm] for draw in listed])
