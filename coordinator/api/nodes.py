"""What nodes call: register, beat, lease, submit, return, and ask whom to fetch from."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import sqlalchemy as sa
from aiohttp import web

from coordinator.api.guard import BOUNDS, HERE, place
from coordinator.api.http import ROUND, Asked, act, body, commit, read_signed_request, reply
from coordinator.api.probes import is_proxied
from coordinator.base.clock import now_ms
from coordinator.reports.explain import explain
from coordinator.service.round import Round
from coordinator.store.state import get_fact
from coordinator.transactions import (
    batches,
    blames,
    broadcasts,
    checked_rollouts,
    claims,
    leases,
    links,
    offers,
    owners,
    payouts,
    policy_versions,
    rails,
    registry,
)
from coordinator.transactions.checked_rollouts import CheckedRollout, Known, Owners, Unreadable
from coordinator.transactions.claims import Judge
from coordinator.transactions.leases import LeaseTerms
from coordinator.transactions.partial_rollouts import SignedFragment
from ledger.payout_proof import PayoutRequest
from protocol import limits
from protocol.errors import NotFound
from protocol.ids import NodeId
from protocol.people.owner import EarningsRequest
from protocol.wire.message import Message
from protocol.work.auditing import Why
from protocol.work.messages import (
    Fetched,
    FetchPlan,
    Heartbeat,
    HeartbeatReply,
    LeaseProgress,
    LeaseProgressReply,
    LeaseRequest,
    PlanRequest,
    Register,
    ReturnLeases,
    Submission,
    SubmissionReply,
    Verdict,
    VersionRequest,
)

M = TypeVar("M", bound=Message)
T = TypeVar("T")

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
    here = request.app[ROUND]
    await act(request, Heartbeat, _beat, evidence=await here.blame_evidence())
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
    draw = await here.draw()
    offered = await act(request, LeaseRequest, offers.offer, terms=here.terms, draw=draw, place=_place(request))
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
    judge = await request.app[ROUND].judge()
    said = await read_signed_request(request, LeaseProgress)
    words = await _read(request, said, said.message.fragments, checked_rollouts.read_fragments, judge)
    return reply(await commit(request, said, _progress, words=words, judge=judge))


@routes.post("/v1/rollouts")
async def submit(request: web.Request) -> web.Response:
    """Signed rollouts; each gets a verdict."""
    here = request.app[ROUND]
    judge = await here.judge()
    said = await read_signed_request(request, Submission)
    rollouts = await _read(request, said, said.message.rollouts, checked_rollouts.read_rollouts, judge)
    verdicts = await commit(request, said, _take_all, rollouts=rollouts, judge=judge)
    here.batch_ready.set()
    here.unscored.set()
    return reply(SubmissionReply(verdicts=verdicts))


async def _read(
    request: web.Request,
    said: Asked[M],
    envelopes: Sequence[bytes],
    read: Callable[[NodeId, Sequence[bytes], Known | None], T],
    judge: Judge,
) -> T:
    """Read the envelopes of a request; where they may be dear to decode, only after their leases were looked up."""
    if not checked_rollouts.are_heavy(envelopes):
        return read(said.node, envelopes, None)
    beside = request.app[ROUND].beside_the_loop
    named = await beside(lambda: checked_rollouts.leases_named(envelopes))
    known = Known(said.node, await commit(request, said, _owners_of, named=named), judge.bounds.max_new_tokens)
    return await beside(lambda: read(said.node, envelopes, known))


@routes.post("/v1/verdicts")
async def verdicts(request: web.Request) -> web.Response:
    """What became of this node's leases, and by what evidence."""
    here = request.app[ROUND]
    tolerances = await asyncio.to_thread(here.tolerances)
    terms, found = here.config.audit.tolerance, tolerances.model_dump_json().encode()
    node, about = await act(request, Why, _asks_why)
    explained = await here.database.read(explain, node, about, tolerance=terms, tolerances=found, now_ms=now_ms())
    return reply(explained)


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
    node, _ = await act(request, EarningsRequest, _registered)
    return reply(await request.app[ROUND].database.read(owners.earnings, node, now_ms=now_ms()))


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
        owners.record_statement,
        envelope,
        round_id=here.round_id,
        scheme=rails.scheme(terms),
        delay_ms=int(terms.address_delay_h * 3_600_000),
        now_ms=now_ms(),
    )
    return reply(taken)


def _asks_why(connection: sa.Connection, node: NodeId, message: Why, *, now_ms: int) -> tuple[NodeId, Why]:
    registry.require_node(connection, node)
    return node, message


def _asks_for(connection: sa.Connection, node: NodeId, message: PayoutRequest, *, now_ms: int) -> tuple[NodeId, int]:
    registry.require_node(connection, node)
    return node, message.batch


def _registered(connection: sa.Connection, node: NodeId, message: M, *, now_ms: int) -> tuple[NodeId, M]:
    registry.require_node(connection, node)
    return node, message


def _plan(
    connection: sa.Connection, node: NodeId, message: PlanRequest, *, here: Round, caller: str, now_ms: int
) -> FetchPlan:
    """One after the other: the first question plans, and those that wait behind it find the plan made."""
    # Not the version that the node names: by naming ever others, one node would have all plans made anew.
    version, _ = policy_versions.newest_version(connection)
    here.plans.report(node, message, caller=caller)
    if here.plans.is_stale(version, now_ms):
        live = registry.live_nodes(connection, silent_after_ms=here.silent_after_ms, now_ms=now_ms)
        live.setdefault(node, "")
        source = here.seeder.peer_id if here.seeder else ""
        known = links.measured(connection, rates=not here.plans.has(version))
        source_up, nodes = links.node_links(live, known, source=source, source_best=here.seeder_up)
        also = registry.further_addresses(connection, silent_after_ms=here.silent_after_ms, now_ms=now_ms)
        feeding = None if here.plans.has(version) else here.plans.choose(connection, live)
        here.plans.update(version, live, source_up, nodes, now_ms, also=also, dialled=known.dialled, feeding=feeding)
    here.plans.fit_in(node)
    return here.plans.part(node, here.seeder)


def _place(request: web.Request) -> str:
    """The neighbourhood that a request came from; no name where one address may stand for many callers."""
    many = is_proxied(request) or not request.app[ROUND].config.round.connections_per_address
    return HERE if many else place(request.remote, request.app[BOUNDS].own_addresses)


def _hint(request: web.Request) -> HeartbeatReply:
    here = request.app[ROUND]
    return HeartbeatReply(
        newest_version=here.news.version,
        heartbeat_s=here.config.leases.heartbeat_s,
        finished=here.news.finished,
    )


def _beat(
    connection: sa.Connection, node: NodeId, message: Heartbeat, *, evidence: blames.BlameEvidence, now_ms: int
) -> None:
    registry.heartbeat(connection, node, message, now_ms=now_ms)
    if message.blames:
        blames.record(connection, node, message.blames, evidence, now_ms=now_ms)
    broadcasts.record_progress(connection, node, message.reached, now_ms=now_ms)


def _heard_of(connection: sa.Connection, node: NodeId, message: VersionRequest, *, now_ms: int) -> tuple[NodeId, int]:
    registry.require_node(connection, node)
    return node, message.newer_than


def _give_back(
    connection: sa.Connection, node: NodeId, message: ReturnLeases, *, terms: LeaseTerms, now_ms: int
) -> int:
    registry.require_node(connection, node)
    return leases.give_back(connection, node, message, terms=terms, now_ms=now_ms)


def _owners_of(
    connection: sa.Connection, node: NodeId, _message: Message, *, named: Collection[str], now_ms: int
) -> Owners:
    registry.require_node(connection, node)
    return claims.owners_of(connection, named) if named else {}


def _progress(
    connection: sa.Connection,
    node: NodeId,
    message: LeaseProgress,
    *,
    words: Sequence[SignedFragment],
    judge: Judge,
    now_ms: int,
) -> LeaseProgressReply:
    registry.require_node(connection, node)
    return claims.take_progress(connection, node, message.held, words, judge=judge, now_ms=now_ms)


def _take_all(
    connection: sa.Connection,
    node: NodeId,
    _message: Submission,
    *,
    rollouts: Sequence[CheckedRollout | Unreadable],
    judge: Judge,
    now_ms: int,
) -> tuple[Verdict, ...]:
    registry.require_node(connection, node)
    verdicts = claims.receive_rollouts(connection, node, rollouts, judge=judge, now_ms=now_ms)
    if get_fact(connection, "finished", False):
        # Leased before the round ended, and no report will come to settle it.
        batches.release_leftovers(connection, audits=judge.audits, now_ms=now_ms)
    return verdicts
