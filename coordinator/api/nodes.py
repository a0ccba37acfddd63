"""Routes for nodes: register, heartbeat, lease, submit, return leases, request a fetch plan, and probe the connection.

- With probes, nodes measure their upload speed, and whether they can be dialled. Bodies are read up to a limit and
  discarded. The server dials only the address of a signed request, a few at once, of which one neighbourhood has a
  quarter: keys are free, and a dial that nobody answers takes seconds.
- The reply to a failed dial takes the same time for every cause, so that it does not reveal open ports of a proxy.
"""

import asyncio
import hmac
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeVar

import sqlalchemy as sa
from aiohttp import web

from coordinator.api.caller import HERE, known_caller, place_of
from coordinator.api.guard import BOUNDS, SHARES
from coordinator.api.http import ROUND, Asked, act, body, commit, effect_of, pieces, read_signed_request, reply
from coordinator.api.strangers import read_for_stranger
from coordinator.base.clock import now_ms
from coordinator.reports.explain import explain
from coordinator.service.round import Round
from coordinator.service.waiting import LeaseOffer
from coordinator.store.facts import FINISHED, get_fact
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
from protocol.errors import NotFound, Overloaded
from protocol.ids import NodeId
from protocol.people.owner import EarningsRequest
from protocol.wire.message import Message
from protocol.work.auditing import Why
from protocol.work.lease import Lease
from protocol.work.messages import (
    DIAL_S,
    Dial,
    Dialled,
    Fetched,
    FetchPlan,
    Heartbeat,
    HeartbeatReply,
    LeaseProgress,
    LeaseProgressReply,
    LeaseReply,
    LeaseRequest,
    PlanRequest,
    Register,
    ReturnLeases,
    Submission,
    SubmissionReply,
    Uploaded,
    Verdict,
    VersionRequest,
)

M = TypeVar("M", bound=Message)
T = TypeVar("T")

routes = web.RouteTableDef()


@routes.post("/v1/nodes")
async def register(request: web.Request) -> web.Response:
    """Register a node in the round, or change its price, name or address."""
    round_ = request.app[ROUND]
    market = {"max_price": round_.config.market.max_price_micros_per_mtok, "unit": round_.config.round.money}
    caller = known_caller(request)
    await act(request, Register, registry.register, **market, invited=round_.invited, caller=caller)
    return reply(_hint(request))


@routes.post("/v1/heartbeat")
async def heartbeat(request: web.Request) -> web.Response:
    """Record a node's activity and model version."""
    round_ = request.app[ROUND]
    evidence, external = await round_.policy.blame_evidence(), round_.config.learner.external
    node, session = await act(request, Heartbeat, _beat, evidence=evidence, external=external)
    round_.sessions.require_only(node, session, time.monotonic())
    return reply(_hint(request))


@routes.post("/v1/versions")
async def newer_version(request: web.Request) -> web.Response:
    """Answer when there is a newer version than the node knows, so that it fetches it at once."""
    round_ = request.app[ROUND]
    node, known = await act(request, VersionRequest, _heard_of)
    await round_.news.wait_for_newer(node, known)
    return reply(_hint(request))


@routes.post("/v1/leases")
async def lease(request: web.Request) -> web.Response:
    """Offer leases; if only a newer version or a query can bring some, hold the answer until there is one."""
    round_, said = request.app[ROUND], await read_signed_request(request, LeaseRequest)
    draw, version = await round_.policy.draw(), round_.news.version
    make_offer = partial(effect_of, said, offers.offer, terms=round_.terms, draw=draw, place=_place(request))

    async def offer() -> LeaseReply:
        return await round_.database.run_for_node(make_offer())

    calls, offered = round_.waiting.idle_nodes.calls, await offer()
    while offered.reason == "ahead" and round_.waiting.idle_nodes.calls > calls:  # a query came during the offer
        calls, offered = round_.waiting.idle_nodes.calls, await offer()
    if offered.reason == "ahead":
        offered = await _offer_when_called(request, make_offer, offered, version)
    return reply(offered)


async def _offer_when_called(
    request: web.Request, make_offer: Callable[[], LeaseOffer], offered: LeaseReply, version: int
) -> LeaseReply:
    """Hold a request that got nothing until there is a version above `version`, or leases that answer a query."""
    round_, loop = request.app[ROUND], asyncio.get_running_loop()
    until_s = loop.time() + request.app[BOUNDS].lease_hold_s

    def offer_now() -> LeaseOffer | None:
        has_left, is_behind = request.transport is None, round_.news.version > version
        return None if has_left or is_behind else make_offer()

    with round_.waiting.idle_nodes.waiting(offer_now) as node:
        while offered.reason == "ahead" and round_.news.version <= version:
            if (call := await node.called(until_s - loop.time())) is None:
                break
            if call.offered is not None:
                if (answer := await call.offered) is None:  # the query was not recorded
                    continue
                offered = answer
            elif (offer := offer_now()) is not None:
                offered = await round_.database.run_for_node(offer)
            if not offered.leases:
                node.pass_on()
    return offered.model_copy(update={"newest_version": round_.news.version})


@routes.post("/v1/leases/return")
async def give_back(request: web.Request) -> web.Response:
    """Take back leases that a node will not finish."""
    await act(request, ReturnLeases, _give_back, terms=request.app[ROUND].terms)
    return reply(_hint(request))


@routes.post("/v1/leases/progress")
async def progress(request: web.Request) -> web.Response:
    """Record fragments of leases that take long, so that their samples survive a loss of the node."""
    judge = await request.app[ROUND].judge()
    said = await read_signed_request(request, LeaseProgress)
    words = await _read(request, said, said.message.fragments, checked_rollouts.read_fragments, judge)
    answer = await commit(request, said, _progress, words=words, judge=judge)
    if words:
        request.app[ROUND].waiting.queries.check_now()
    return reply(answer)


@routes.post("/v1/rollouts")
async def submit(request: web.Request) -> web.Response:
    """Accept signed rollouts, and return a verdict on each; of episodes, the next turns, too, if they come soon."""
    round_ = request.app[ROUND]
    judge = await round_.judge()
    said = await read_signed_request(request, Submission)
    rollouts = await _read(request, said, said.message.rollouts, checked_rollouts.read_rollouts, judge)
    verdicts = await commit(request, said, _take_all, rollouts=rollouts, judge=judge)
    round_.waiting.wake_for_rollouts()
    turns = await _next_turns(request, said, rollouts, verdicts) if round_.plays and round_.leads else ()
    return reply(SubmissionReply(verdicts=verdicts, leases=turns))


async def _next_turns(
    request: web.Request,
    said: Asked[Submission],
    rollouts: Sequence[CheckedRollout | Unreadable],
    verdicts: Sequence[Verdict],
) -> tuple[Lease, ...]:
    """Return the next turns of the episodes whose turns were accepted now, if the environment answers soon.

    Of turns that were accepted earlier, whose answer may have been lost, the next ones are returned, too.
    """
    round_ = request.app[ROUND]
    taken = {verdict.lease_id for verdict in verdicts if verdict.outcome == "accepted"}
    sent_again = [verdict.lease_id for verdict in verdicts if verdict.outcome == "already_accepted"]
    claims = {answer.claim_id: answer.lease_id for answer in rollouts if isinstance(answer, CheckedRollout)}
    claims = {claim_id: lease_id for claim_id, lease_id in claims.items() if lease_id in taken}
    if not (claims or sent_again) or round_.news.finished:
        return ()
    draw, lease_ids = await round_.policy.draw(), list(claims.values())
    give = partial(offers.offer_turns, sent_again=sent_again, terms=round_.terms, draw=draw)

    def offer(connection: sa.Connection) -> tuple[Lease, ...]:
        return give(connection, said.node, lease_ids, now_ms=now_ms())

    leases = await round_.waiting.turns.wait(claims.keys(), offer) if claims else None
    return await round_.database.run_for_node(offer) if leases is None else leases


async def _read(
    request: web.Request,
    said: Asked[M],
    envelopes: Sequence[bytes],
    read: Callable[[NodeId, Sequence[bytes], Known | None], T],
    judge: Judge,
) -> T:
    """Read the envelopes of a request; look up their leases first if decoding them may be expensive."""
    if not checked_rollouts.are_heavy(envelopes):
        return read(said.node, envelopes, None)
    beside = request.app[ROUND].beside_the_loop
    named = await beside(lambda: checked_rollouts.leases_named(envelopes))
    known = Known(said.node, await commit(request, said, _owners_of, named=named), judge.bounds.max_new_tokens)
    return await beside(lambda: read(said.node, envelopes, known))


@routes.post("/v1/verdicts")
async def verdicts(request: web.Request) -> web.Response:
    """Explain the verdicts on this node's leases, with their evidence."""
    round_ = request.app[ROUND]
    tolerances = await asyncio.to_thread(round_.tolerances)
    terms, measured = round_.config.audit.tolerance, tolerances.model_dump_json().encode()
    node, about = await act(request, Why, _asks_why)
    read = partial(explain, tolerance=terms, tolerances=measured, now_ms=now_ms())
    return reply(await read_for_stranger(request, read, node, about))


@routes.post("/v1/plan")
async def plan(request: web.Request) -> web.Response:
    """Return this node's part of the fetch plan for the newest version."""
    round_ = request.app[ROUND]
    if not round_.leads:  # with two plans for one version, a node would have parents that do not know it
        raise NotFound("This process builds no fetch plans.", hint="Send /v1/plan to the process that leads the round.")
    caller = known_caller(request)
    node, message = await act(request, PlanRequest, _registered)
    return reply(await round_.database.read(_plan, node, message, round_=round_, caller=caller, now_ms=now_ms()))


@routes.post("/v1/fetched")
async def fetched(request: web.Request) -> web.Response:
    """Record a transfer receipt for chunks that other nodes sent."""
    await act(request, Fetched, links.take_receipt, round_id=request.app[ROUND].round_id)
    return reply(_hint(request))


@routes.post("/v1/earnings")
async def earnings(request: web.Request) -> web.Response:
    """Return the earnings of a node and of its owner's other nodes."""
    node, _ = await act(request, EarningsRequest, _registered)
    return reply(await read_for_stranger(request, owners.earnings, node, now_ms=now_ms()))


@routes.post("/v1/payouts")
async def payout(request: web.Request) -> web.Response:
    """Return the amount that this node's owner gets in a payout batch, with its proof."""
    node, number = await act(request, PayoutRequest, _asks_for)
    return reply(await read_for_stranger(request, payouts.prove, node, number, request.app[ROUND].roots))


@routes.post("/v1/owners")
async def state(request: web.Request) -> web.Response:
    """Record an owner's signed and numbered statement. Anyone may deliver it, and repeating it is harmless."""
    round_ = request.app[ROUND]
    round_.database.require_room()
    envelope = await body(request, limits.STATEMENT_MAX_BYTES)
    terms = round_.config.payouts
    taken = await round_.database.run_for_node(
        owners.record_statement,
        envelope,
        round_id=round_.round_id,
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
    connection: sa.Connection, node: NodeId, message: PlanRequest, *, round_: Round, caller: str, now_ms: int
) -> FetchPlan:
    """Return a node's part of the plan. Requests run one at a time: the first builds the plan for those that wait."""
    # Ignore the version that the node names: with changing versions, one node could cause constant replanning.
    version, _ = policy_versions.newest_version(connection)
    round_.plans.report(node, message, caller=caller)
    if round_.plans.is_stale(version, now_ms):
        live = registry.live_nodes(connection, silent_after_ms=round_.silent_after_ms, now_ms=now_ms)
        live.setdefault(node, "")
        source = round_.plans.seeder.peer_id if round_.plans.seeder else ""
        known = links.measured(connection, rates=not round_.plans.has(version))
        source_up, nodes = links.node_links(live, known, source=source, source_best=round_.plans.seeder_up)
        also = registry.further_addresses(connection, silent_after_ms=round_.silent_after_ms, now_ms=now_ms)
        feeding = None if round_.plans.has(version) else round_.plans.choose(connection, live)
        round_.plans.update(version, live, source_up, nodes, now_ms, also=also, dialled=known.dialled, feeding=feeding)
    round_.plans.fit_in(node)
    return round_.plans.plan_for(node)


def _place(request: web.Request) -> str:
    """Return the neighbourhood of a request's client; `HERE` if one address may stand for many clients."""
    return place_of(request) if request.app[ROUND].config.round.connections_per_address else HERE


def _hint(request: web.Request) -> HeartbeatReply:
    round_ = request.app[ROUND]
    return HeartbeatReply(
        newest_version=round_.news.version,
        heartbeat_s=round_.config.leases.heartbeat_s,
        finished=round_.news.finished,
    )


def _beat(
    connection: sa.Connection,
    node: NodeId,
    message: Heartbeat,
    *,
    evidence: blames.BlameEvidence,
    external: bool,
    now_ms: int,
) -> tuple[NodeId, str]:
    registry.heartbeat(connection, node, message, now_ms=now_ms)
    if message.blames:
        blames.record(connection, node, message.blames, evidence, now_ms=now_ms)
    broadcasts.record_progress(connection, node, message.reached, now_ms=now_ms, external=external)
    return node, message.session


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
    if get_fact(connection, FINISHED):
        # These were leased before the round ended, and no report will settle them.
        batches.release_leftovers(connection, audits=judge.audits, now_ms=now_ms)
    return verdicts


DIALS_AT_ONCE = 8

DIALS = web.AppKey("dials", Counter[str])
"""Dials under way, by place."""


@routes.post("/v1/probe/upload")
async def upload(request: web.Request) -> web.Response:
    """Read and discard a body, and return its size."""
    size = sum([len(piece) async for piece in pieces(request, limits.PROBE_MAX_BYTES)])
    return reply(Uploaded(size_bytes=size))


@routes.post("/v1/probe/dial")
async def dial(request: web.Request) -> web.Response:
    """Dial the address of the request's client, and return whether its listener answers."""
    wanted = await act(request, Dial, _wanted)
    address = known_caller(request)
    if not address:
        return reply(Dialled(reached=False, proxied=True))
    dials, where = request.app[DIALS], place_of(request)
    if dials.total() >= DIALS_AT_ONCE or (where != HERE and dials[where] >= DIALS_AT_ONCE // SHARES):
        raise Overloaded("The server is dialling too many other nodes.", hint="Try again in a few seconds.")
    dials[where] += 1
    try:
        return reply(Dialled(reached=await _says(address, wanted.port, wanted.word), proxied=False))
    finally:
        dials[where] -= 1
        if not dials[where]:
            del dials[where]


def share(app: web.Application) -> None:
    """Store the state that these handlers share in `app`."""
    app[DIALS] = Counter()


def _wanted(_connection: sa.Connection, _node: NodeId, message: Dial, *, now_ms: int) -> Dial:
    return message


async def _says(host: str, port: int, word: str) -> bool:
    """Return True if a listener at `host`:`port` sends `word`."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + DIAL_S
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout_at(ends_at):
            reader, writer = await asyncio.open_connection(host, port)
            if hmac.compare_digest(await reader.readexactly(len(word)), word.encode()):
                return True
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        pass
    finally:
        if writer is not None:
            writer.close()
    await asyncio.sleep(max(0.0, ends_at - loop.time()))
    return False
