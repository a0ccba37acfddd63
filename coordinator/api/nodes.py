"""What nodes call: register, beat, lease, submit, return, and ask whom to fetch from."""

import asyncio

import sqlalchemy as sa
from aiohttp import web

from coordinator.api.http import ROUND, act, body, reply
from coordinator.api.probes import is_proxied
from coordinator.money import payouts, rails
from coordinator.people import owners, registry
from coordinator.people.explain import explain
from coordinator.publishing import publish
from coordinator.round import Round, now_ms
from coordinator.spreading import broadcasts, links
from coordinator.store.state import get_fact
from coordinator.work import batches, intake, leases, offers
from coordinator.work.intake import Judge
from coordinator.work.leases import Terms
from ledger.payout_proof import PayoutRequest
from protocol import limits
from protocol.auditing import Why
from protocol.errors import NotFound
from protocol.ids import NodeId
from protocol.messages import (
    Fetched,
    Heartbeat,
    HeartbeatReply,
    LeaseProgress,
    LeaseProgressReply,
    LeaseRequest,
    Plan,
    PlanRequest,
    Register,
    ReturnLeases,
    Submission,
    SubmissionReply,
    Verdict,
    VersionRequest,
)
from protocol.owner import Earnings, EarningsRequest

routes = web.RouteTableDef()

HOLD_S = 2.0
"""How long a node that is ahead waits for an answer: it hears of the next version at once, and need not poll for it."""

NEWS_HOLD_S = 20.0
"""How long a question for a newer version stays open; below every client's and proxy's patience."""

QUESTIONS_PER_NODE = 2
"""Held at once: one, and one whose connection was lost unnoticed; another is answered at once."""


@routes.post("/v1/nodes")
async def register(request: web.Request) -> web.Response:
    """Take part in the round, or change price, name or address."""
    here = request.app[ROUND]
    price = here.config.market.max_price_micros_per_mtok
    caller = "" if is_proxied(request) else request.remote or ""
    await act(request, Register, registry.register, max_price=price, invited=here.invited, caller=caller)
    return reply(_hint(request))


@routes.post("/v1/heartbeat")
async def heartbeat(request: web.Request) -> web.Response:
    """What a node does and has."""
    await act(request, Heartbeat, _beat)
    return reply(_hint(request))


@routes.post("/v1/versions")
async def newer_version(request: web.Request) -> web.Response:
    """Held until there is a newer version than the node has heard of, so that it fetches it at once."""
    here = request.app[ROUND]
    node, known = await act(request, VersionRequest, _heard_of)
    here.questions[node] += 1
    try:
        if here.questions[node] <= QUESTIONS_PER_NODE:
            await here.version_after(known, patience_s=NEWS_HOLD_S)
    finally:
        here.questions[node] -= 1
        if not here.questions[node]:
            del here.questions[node]
    return reply(_hint(request))


@routes.post("/v1/leases")
async def lease(request: web.Request) -> web.Response:
    """Offer work; where only a newer version can bring some, hold the answer until there is one."""
    here = request.app[ROUND]
    offered = await act(request, LeaseRequest, offers.offer, terms=here.terms, draw=await here.draw())
    if offered.reason == "ahead":
        newest = await here.version_after(offered.newest_version, patience_s=HOLD_S)
        offered = offered.model_copy(update={"newest_version": newest})
    return reply(offered)


@routes.post("/v1/leases/return")
async def give_back(request: web.Request) -> web.Response:
    """Leases that a node will not answer."""
    await act(request, ReturnLeases, _give_back, terms=request.app[ROUND].terms)
    return reply(_hint(request))


@routes.post("/v1/leases/progress")
async def progress(request: web.Request) -> web.Response:
    """Told of leases that take long, so that nothing is lost with their node."""
    return reply(await act(request, LeaseProgress, _progress, judge=await request.app[ROUND].judge()))


@routes.post("/v1/rollouts")
async def submit(request: web.Request) -> web.Response:
    """Signed rollouts; each gets a verdict."""
    here = request.app[ROUND]
    verdicts = await act(request, Submission, _take_all, judge=await here.judge())
    here.batch_ready.set()
    here.unscored.set()
    return reply(SubmissionReply(verdicts=verdicts))


@routes.post("/v1/verdicts")
async def verdicts(request: web.Request) -> web.Response:
    """What became of this node's leases, and by what evidence."""
    here = request.app[ROUND]
    tolerances = await asyncio.to_thread(here.tolerances)
    context = {"tolerance": here.config.audit.tolerance, "tolerances": tolerances.model_dump_json().encode()}
    return reply(await act(request, Why, explain, **context))


@routes.post("/v1/plan")
async def plan(request: web.Request) -> web.Response:
    """This node's part of the plan for the newest version."""
    here = request.app[ROUND]
    if not here.leads:  # two plans for one version would send a node to parents that know nothing of it
        raise NotFound("This process makes no plans.", hint="Send /v1/plan to the process that leads the round.")
    caller = "" if is_proxied(request) else request.remote or ""
    node, message = await act(request, PlanRequest, _registered)
    return reply(await here.database.read(_plan, node, message, here=here, caller=caller, now_ms=now_ms()))


@routes.post("/v1/fetched")
async def fetched(request: web.Request) -> web.Response:
    """A receipt for chunks that others sent."""
    await act(request, Fetched, links.take_receipt, round_id=request.app[ROUND].round_id)
    return reply(_hint(request))


@routes.post("/v1/earnings")
async def earnings(request: web.Request) -> web.Response:
    """What a node and its owner's others have earned."""
    return reply(await act(request, EarningsRequest, _earnings))


@routes.post("/v1/payouts")
async def payout(request: web.Request) -> web.Response:
    """What this node's owner gets in a batch of payouts, with its proof."""
    here = request.app[ROUND]
    node, number = await act(request, PayoutRequest, _asks_for)
    return reply(await here.database.read(payouts.prove, node, number, here.roots))


@routes.post("/v1/owners")
async def state(request: web.Request) -> web.Response:
    """An owner's own word, by whoever brings it: it is signed and numbered, and repeating it is harmless."""
    here = request.app[ROUND]
    here.database.require_room()
    envelope = await body(request, limits.STATEMENT_MAX_BYTES)
    terms = here.config.payouts
    taken = await here.database.run_for_node(
        owners.take,
        envelope,
        round_id=here.round_id,
        scheme=rails.scheme(terms),
        delay_ms=int(terms.address_delay_h * 3_600_000),
        now_ms=now_ms(),
    )
    return reply(taken)


def _earnings(connection: sa.Connection, node: NodeId, _message: EarningsRequest, *, now_ms: int) -> Earnings:
    registry.require_node(connection, node)
    return owners.earnings(connection, node, now_ms=now_ms)


def _asks_for(connection: sa.Connection, node: NodeId, message: PayoutRequest, *, now_ms: int) -> tuple[NodeId, int]:
    registry.require_node(connection, node)
    return node, message.batch


def _registered(
    connection: sa.Connection, node: NodeId, message: PlanRequest, *, now_ms: int
) -> tuple[NodeId, PlanRequest]:
    registry.require_node(connection, node)
    return node, message


def _plan(
    connection: sa.Connection, node: NodeId, message: PlanRequest, *, here: Round, caller: str, now_ms: int
) -> Plan:
    """One after the other: the first question plans, and those that wait behind it find the plan made."""
    # Not the version that the node names: by naming ever others, one node would have all plans made anew.
    version, _ = publish.newest_version(connection)
    here.plans.report(node, message, caller=caller)
    if here.plans.is_stale(version, now_ms):
        live = registry.live_nodes(connection, silent_after_ms=here.silent_after_ms, now_ms=now_ms)
        live.setdefault(node, "")
        source = here.seeder.peer_id if here.seeder else ""
        known = links.measured(connection, rates=not here.plans.has(version))
        source_up, nodes = links.node_links(live, known, source=source, source_best=here.seeder_up)
        also = registry.further_addresses(connection, silent_after_ms=here.silent_after_ms, now_ms=now_ms)
        proven = frozenset() if here.plans.has(version) else here.plans.proven(connection, version)
        here.plans.update(version, live, source_up, nodes, now_ms, also=also, proven=proven)
    here.plans.fit_in(node)
    return here.plans.part(node, here.seeder)


def _hint(request: web.Request) -> HeartbeatReply:
    here = request.app[ROUND]
    return HeartbeatReply(
        newest_version=here.news.version,
        heartbeat_s=here.config.leases.heartbeat_s,
        finished=here.news.finished,
    )


def _beat(connection: sa.Connection, node: NodeId, message: Heartbeat, *, now_ms: int) -> None:
    registry.heartbeat(connection, node, message, now_ms=now_ms)
    broadcasts.note(connection, node, message.reached, now_ms=now_ms)


def _heard_of(connection: sa.Connection, node: NodeId, message: VersionRequest, *, now_ms: int) -> tuple[NodeId, int]:
    registry.require_node(connection, node)
    return node, message.newer_than


def _give_back(connection: sa.Connection, node: NodeId, message: ReturnLeases, *, terms: Terms, now_ms: int) -> int:
    registry.require_node(connection, node)
    return leases.give_back(connection, node, message, terms=terms, now_ms=now_ms)


def _progress(
    connection: sa.Connection, node: NodeId, message: LeaseProgress, *, judge: Judge, now_ms: int
) -> LeaseProgressReply:
    registry.require_node(connection, node)
    return intake.take_progress(connection, node, message, judge=judge, now_ms=now_ms)


def _take_all(
    connection: sa.Connection, node: NodeId, message: Submission, *, judge: Judge, now_ms: int
) -> tuple[Verdict, ...]:
    registry.require_node(connection, node)
    verdicts = tuple(intake.take(connection, node, rollout, judge=judge, now_ms=now_ms) for rollout in message.rollouts)
    if get_fact(connection, "finished", False):
        # Leased before the round ended, and no report will come to settle it.
        batches.release_leftovers(connection, audits=judge.audits, now_ms=now_ms)
    return verdicts
