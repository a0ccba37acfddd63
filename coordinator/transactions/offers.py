"""Offers: the choice of groups for a node and the leases for them, as effects.

- The oldest open groups go first; a new one is made only when none is open. With `LeaseTerms.lookahead`, a node gets
  those groups of a window whose expected length suits its pace (`coordinator.rules.lengths`).
- `coordinator.transactions.admission` decides how many groups it may have now, or why none.
- When a batch waits only for a few late groups, these are given to a second node
  (`coordinator.transactions.stragglers`).
- Next turns of episodes go first: to the node that took the last turn, with its answer, or to whoever asks with the
  same version (`coordinator.transactions.turns`). If the coordinator ends before it sends that answer, the node does
  not know of the leases, and would wait for them until they expire: it gets others when it sends its rollouts again.
- While others ask, a newcomer gets a trial, for which nothing waits (`coordinator.transactions.newcomers`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import sqlalchemy as sa

from coordinator.rules import lengths
from coordinator.rules.lifecycle import GroupState
from coordinator.rules.prompt_refs import QUERY, PromptRef
from coordinator.store.facts import get_fact
from coordinator.store.tables import IS_OPEN, groups, is_for_training, leases
from coordinator.transactions import (
    admission,
    curriculum,
    evaluation_leases,
    exact_work,
    foresight,
    newcomers,
    partial_rollouts,
    queries,
    registry,
    standings,
    stragglers,
    tally,
    turns,
)
from coordinator.transactions.admission import Admitted
from coordinator.transactions.leases import (
    BACK,
    GroupToLease,
    LeaseTerms,
    OpenLease,
    end_unanswered,
    expire,
    reopen,
    set_group,
)
from coordinator.transactions.partial_rollouts import Told
from coordinator.transactions.registry import WorkerRow
from ledger.entry import amount, with_bonus
from ledger.prepared import Prepared
from protocol import limits
from protocol.ids import NodeId
from protocol.work.lease import Lease, LeaseEvent, LeaseState, Prefix, is_exact
from protocol.work.messages import LeaseReply, LeaseRequest, Reason
from protocol.work.rollout import pack_tokens

RETRY_S: dict[Reason, float] = {
    "": 0.0,
    "ahead": 0.0,
    "busy": 0.25,
    "old_version": 1.0,
    "numerics": 10.0,
    "paused": 5.0,
    "standby": 5.0,
    "budget": 10.0,
    "audits": 1.0,
    "finished": 1.0,
}
"""The seconds after which a node asks again, by the reason why it got nothing."""


class BegunGroup(NamedTuple):
    """The ended lease from which a group's next node may continue, and its version."""

    begun: str | None
    begun_version: int | None


class EvaluationOffer(NamedTuple):
    """Leases of evaluation groups for a node."""

    leases: list[Lease]
    stays: bool = False
    """True if the node stays with its version."""
    alone: bool = False
    """True if it gets no other leases."""


# Built once: making a statement costs more than running it, and these run for every lease.
_is_trained_on = is_for_training(groups.c.group_no)
_fits = sa.case(
    (groups.c.begun_version == sa.bindparam("version", type_=sa.Integer), 0), (groups.c.begun.is_(None), 1), else_=2
)
_waiting = Prepared(
    sa.select(groups.c.group_no, groups.c.begun, groups.c.begun_version)
    .where(groups.c.state == GroupState.OPEN.value, _is_trained_on)
    .order_by(_fits, groups.c.group_no)
    .limit(sa.bindparam("count", type_=sa.Integer)),
    GroupToLease,
)
_oldest = sa.select(groups.c.group_no, groups.c.begun, groups.c.begun_version).order_by(groups.c.group_no)
_some = _oldest.where(_is_trained_on).limit(sa.bindparam("count", type_=sa.Integer))
_of_version = groups.c.begun_version == sa.bindparam("version", type_=sa.Integer)
_is_at_turn = groups.c.state == GroupState.TURN.value
_begun_here = Prepared(_some.where(groups.c.state == GroupState.OPEN.value, _of_version), GroupToLease)
_turns_here = Prepared(_some.where(_is_at_turn, _of_version), GroupToLease)
_waited_long = groups.c.waits_until_ms <= sa.bindparam("now", type_=sa.BigInteger)
_turns_in_vain = Prepared(_some.where(_is_at_turn, _waited_long), GroupToLease)
_after = groups.c.begun.in_(sa.bindparam("leases", expanding=True))
_answered_by = Prepared(_oldest.where(_is_at_turn, _after), GroupToLease)
_unheard = Prepared(
    sa.select(leases.c.lease_id, leases.c.group_no, leases.c.surplus).where(
        IS_OPEN,
        leases.c.state == LeaseState.OFFERED.value,  # not reported as held
        leases.c.node_id == sa.bindparam("node"),
        leases.c.continues.in_(sa.bindparam("leases", expanding=True)),
        leases.c.issued_ms <= sa.bindparam("back", type_=sa.BigInteger),
    ),
    OpenLease,
)
_begun_of = Prepared(
    sa.select(groups.c.begun, groups.c.begun_version).where(groups.c.group_no == sa.bindparam("group")), BegunGroup
)
_give_lease = Prepared(sa.insert(leases))


@dataclass(frozen=True)
class PromptDraw:
    """The sources of prompts and random values."""

    prompt: Callable[[PromptRef], list[int]]
    """Returns the tokens of a problem's prompt."""
    lease_id: Callable[[], str]
    seed: Callable[[], int]


def offer(
    connection: sa.Connection,
    node: NodeId,
    message: LeaseRequest,
    *,
    terms: LeaseTerms,
    draw: PromptDraw,
    place: str = "",
    now_ms: int,
) -> LeaseReply:
    """Give a node as many groups as the staleness bound, the budget and its request allow.

    `place` is the network group that it called from; empty if many nodes may call from there.
    """
    worker = _paid_worker(connection, node, message.numerics, terms, now_ms)
    price = worker.price_micros_per_mtok
    expire(connection, terms=terms, now_ms=now_ms)
    admitted = admission.how_many(connection, worker, message, terms, place, now_ms)
    count, reason = admitted.groups, admitted.reason
    served = _serve(connection, worker, message, admitted, terms, draw, now_ms)
    if served and admitted.on_trial:
        admitted = admitted._replace(trials=admitted.trials - len(served))
    message = message.model_copy(update={"groups": message.groups - len(served)}) if served else message
    count = min(count, message.groups)
    measured, stays, alone = _measure(connection, worker, message, admitted, terms, draw, now_ms)
    if measured:
        message = message.model_copy(update={"groups": message.groups - len(measured)})
        count = 0 if alone or admitted.on_trial or not message.groups else min(count, message.groups)
    version = message.version if message.continues else None
    state = GroupState.TRIAL if admitted.on_trial else GroupState.LEASED
    groups = []
    if terms.turn_tokens_max and not alone:
        groups = _take_turns(connection, worker, message, admitted, terms, now_ms)
        count = 0 if message.finishing else max(0, count - len(groups))  # both count what it may hold and cost
    groups += _take_groups(connection, count, version, node, terms, draw, state)
    if groups:
        reason = ""
    if reason == "ahead" and message.groups and terms.over_issue and not admitted.on_trial:
        size, bound, plays = terms.groups_per_update, terms.over_issue, bool(terms.turn_tokens_max)
        late = stragglers.late_groups(connection, node, size=size, bound=bound, plays=plays, now_ms=now_ms)
        hands = min(
            message.groups,
            admission.free_hands(connection, node, terms, now_ms),
            admission.affordable(connection, terms, terms.max_cost_micros(price), now_ms),
        )
        groups = _with_their_turns(connection, late[:hands], version, terms)
        reason = "" if groups else reason
    given = served + measured + _give(connection, node, groups, message, price, terms, draw, now_ms)
    if given and admitted.on_trial:
        newcomers.record_begun(connection, place, terms, now_ms)
    reason = "" if given else reason
    if terms.turn_tokens_max and not stays:
        stays = bool(given) or turns.is_waited_for(connection, node, message.version)
    return LeaseReply(
        leases=tuple(given), newest_version=admitted.newest, reason=reason, retry_s=RETRY_S[reason], stays=stays
    )


def offer_turns(
    connection: sa.Connection,
    node: NodeId,
    lease_ids: Sequence[str],
    *,
    sent_again: Sequence[str] = (),
    terms: LeaseTerms,
    draw: PromptDraw,
    now_ms: int,
) -> tuple[Lease, ...]:
    """Give a node the next turns of the groups whose last turns it took with these leases, as far as they are known.

    `sent_again` are other leases, whose rollouts it has sent again. If it was given their next turns before a restart
    of the coordinator, that answer was lost: new leases replace those.
    """
    worker = registry.require_worker(connection, node)
    if sent_again:
        for lost in _unheard(connection, node=node, leases=list(sent_again), back=get_fact(connection, BACK)):
            end_unanswered(connection, lost, LeaseEvent.CANCEL, terms, now_ms)
        lease_ids = [*lease_ids, *sent_again]
    answered = _answered_by(connection, leases=list(lease_ids))
    if not answered or not worker.works or worker.paused_ms is not None:
        return ()
    hands = admission.free_hands(connection, node, terms, now_ms)
    max_cost = terms.max_cost_micros(with_bonus(worker.price_micros_per_mtok, terms.exact_bonus))
    payable = admission.affordable(connection, terms, max_cost, now_ms)
    others_ask = newcomers.is_fresh(get_fact(connection, newcomers.OTHERS), terms, now_ms)
    on_trial = others_ask and worker.node_id not in terms.probes and newcomers.is_newcomer(connection, worker, terms)
    given = list[Lease]()
    for group_no, begun, version in answered[: min(hands, payable)]:
        turn = turns.last(connection, begun)
        if turn is None or version is None or admission.is_past(connection, version, terms):
            continue
        set_group(connection, group_no, GroupState.TRIAL if on_trial else GroupState.LEASED)
        asks = LeaseRequest(version=version, groups=1, continues=True, numerics=turn.lease.judged_as)
        price = _paid_worker(connection, node, asks.numerics, terms, now_ms).price_micros_per_mtok
        given += _give(connection, node, [GroupToLease(group_no, begun, version)], asks, price, terms, draw, now_ms)
    return tuple(given)


def _paid_worker(connection: sa.Connection, node: NodeId, numerics: str, terms: LeaseTerms, now_ms: int) -> WorkerRow:
    """Return the row of a node with the price that its leases name: the one that it asks, and any bonus of its class.

    The bonus is only for a node whose last judged work had the bits of its class, while an auditor of the round repeats
    that class: the name of a class is public, and would otherwise be worth claiming.
    """
    worker = registry.require_worker(connection, node)
    if not terms.exact_bonus or terms.judges_alike or not is_exact(numerics):
        return worker
    if not exact_work.is_proven(connection, node, numerics, now_ms):
        return worker
    return worker._replace(price_micros_per_mtok=with_bonus(worker.price_micros_per_mtok, terms.exact_bonus))


def _take_turns(
    connection: sa.Connection,
    worker: WorkerRow,
    message: LeaseRequest,
    admitted: Admitted,
    terms: LeaseTerms,
    now_ms: int,
) -> list[GroupToLease]:
    """Lease groups whose next turn waits for a node: those of its version, then those that waited in vain.

    A newcomer on trial gets none: it could spoil what others have played.
    """
    if admitted.on_trial or admitted.reason not in ("", *admission.NOT_NEEDED):
        return []
    node, price = NodeId(worker.node_id), worker.price_micros_per_mtok
    hands = admission.free_hands(connection, node, terms, now_ms)
    payable = admission.affordable(connection, terms, terms.max_cost_micros(price), now_ms)
    most = min(message.groups, terms.groups_per_request, hands, payable)
    if most < 1:
        return []
    taken: list[GroupToLease] = []
    if message.continues:
        taken += _turns_here(connection, version=message.version, count=most)
    if admitted.groups and not message.finishing and len(taken) < most:
        taken += _turns_in_vain(connection, now=now_ms, count=most - len(taken))
    taken = list(dict.fromkeys(taken))
    for group in taken:
        set_group(connection, group.group_no, GroupState.LEASED)
    return taken


def _serve(
    connection: sa.Connection,
    worker: WorkerRow,
    message: LeaseRequest,
    admitted: Admitted,
    terms: LeaseTerms,
    draw: PromptDraw,
    now_ms: int,
) -> list[Lease]:
    """Return leases of queries, which go before all other groups.

    A newcomer on trial gets none if the round trains: a group for training is its trial. Else a query is, and no caller
    reads its tokens before they are accepted.
    """
    if not admitted.queries_wait or message.finishing or (admitted.on_trial and terms.trains):
        return []
    if admitted.reason not in ("", *admission.NOT_NEEDED) or admission.is_past(connection, message.version, terms):
        return []
    node, price = NodeId(worker.node_id), worker.price_micros_per_mtok
    most = min(message.groups, terms.groups_per_request, admission.free_hands(connection, node, terms, now_ms))
    most = min(most, admitted.trials) if admitted.on_trial else most
    waiting = []
    if most > 0:
        on_trial = admitted.on_trial
        waiting = queries.waiting(connection, message.version, most, price=price, on_trial=on_trial, now_ms=now_ms)
    costs = [terms.max_cost_micros(price, query.samples, query.tokens_max) for query in waiting]
    payable = admission.affordable(connection, terms, max(costs, default=0), now_ms)
    taken = [GroupToLease(query.group_no, query.begun, query.begun_version) for query in waiting[:payable]]
    for group in taken:
        set_group(connection, group.group_no, GroupState.TRIAL if admitted.on_trial else GroupState.LEASED)
    return _give(connection, node, taken, message, price, terms, draw, now_ms, is_read=not admitted.on_trial)


def _with_their_turns(
    connection: sa.Connection, late: Sequence[int], version: int | None, terms: LeaseTerms
) -> list[GroupToLease]:
    """Return late groups for a second node: from their start, or from the turn that they have reached."""
    if not terms.turn_tokens_max:
        return [GroupToLease(group_no) for group_no in late]
    taken = list[GroupToLease]()
    for group_no in late:
        begun, begun_version = _begun_of(connection, group=group_no).single_row()
        if turns.last(connection, begun) is None:
            taken.append(GroupToLease(group_no))
        elif begun_version == version:
            taken.append(GroupToLease(group_no, begun, begun_version))
    return taken


def _measure(
    connection: sa.Connection,
    worker: WorkerRow,
    message: LeaseRequest,
    admitted: Admitted,
    terms: LeaseTerms,
    draw: PromptDraw,
    now_ms: int,
) -> EvaluationOffer:
    """Return leases of evaluation groups."""
    on_trial = admitted.on_trial
    if not message.groups or admitted.reason not in ("", *admission.NOT_NEEDED) or (on_trial and not admitted.trials):
        return EvaluationOffer([])
    node, price = NodeId(worker.node_id), worker.price_micros_per_mtok
    asked = min(message.groups, terms.groups_per_request)
    asked = min(asked, admitted.trials) if on_trial else asked
    share, plays = terms.evaluation_share, bool(terms.turn_tokens_max)
    part = evaluation_leases.part(connection, node, message.version, asked, share, admitted, plays=plays)
    if part is None:
        return EvaluationOffer([])
    affordable = admission.affordable(connection, terms, terms.max_cost_micros(price, part.samples), now_ms)
    hands = min(part.most, admission.free_hands(connection, node, terms, now_ms), affordable)
    version = message.version if message.continues else None
    taken = evaluation_leases.lease_evaluation_groups(connection, part.evaluation, hands, version, on_trial=on_trial)
    given = _give(connection, node, taken, message, price, terms, draw, now_ms, part.samples)
    stays = part.stays and bool(given) and evaluation_leases.is_left(connection, part.evaluation, on_trial=on_trial)
    return EvaluationOffer(given, stays, part.alone)


def _give(
    connection: sa.Connection,
    node: NodeId,
    taken: list[GroupToLease],
    message: LeaseRequest,
    price: int,
    terms: LeaseTerms,
    draw: PromptDraw,
    now_ms: int,
    samples: int = 0,
    is_read: bool = True,
) -> list[Lease]:
    """Lease each group, while the leases fit into a message; continue partial rollouts if this node can."""
    given: list[Lease] = []
    room_bytes = limits.MESSAGE_MAX_BYTES // 2
    version = message.version
    for group_no, begun, begun_version in taken:
        turn = turns.last(connection, begun)
        partials = [] if turn else partial_rollouts.chain(connection, begun)
        tellers = [partial.node_id for partial in partials]
        barred = standings.banned_among(connection, tellers) or registry.is_any_revoked(connection, tellers)
        fits, lease = message.continues and begun_version == version and not barred, None
        if fits and turn:
            lease = _continue(turn.lease, turn.prefixes, draw, price, terms, now_ms)
        elif fits:
            lease = _continue_partials(connection, group_no, partials, draw, price, terms, now_ms)
        if lease is None:
            if turn is not None:
                turns.abandon(connection, group_no)
            if partials:
                partial_rollouts.forget(connection, [partial.lease.lease_id for partial in partials])
            source = curriculum.source_of(connection, group_no)
            if source.split == QUERY:
                lease = queries.first_lease(
                    connection,
                    source.number,
                    lease_id=draw.lease_id(),
                    version=version,
                    seed=draw.seed(),
                    price=price,
                    terms=terms,
                    now_ms=now_ms,
                )
            else:
                lease = _begin(source, samples, version, draw, price, terms, now_ms)
            begun = None
        judged_as, report_every_ms = "" if terms.judges_alike else message.numerics, lease.report_every_ms * is_read
        lease = lease.model_copy(update={"judged_as": judged_as, "report_every_ms": report_every_ms})
        room_bytes -= sum(len(prefix.tokens) for prefix in lease.prefixes)
        if room_bytes < 0:
            reopen(connection, group_no, begun)
        else:
            _store(connection, node, group_no, lease, begun, terms, now_ms)
            given.append(lease)
    return given


def _take_groups(
    connection: sa.Connection,
    count: int,
    version: int | None,
    node: NodeId,
    terms: LeaseTerms,
    draw: PromptDraw,
    state: GroupState,
) -> list[GroupToLease]:
    """Set `count` groups that nobody works on to `state`; return each with the lease that left work and that version.

    Open groups that the node can continue come first, then the oldest; then new ones.
    """
    if not count:
        return []
    if terms.lookahead:
        taken = _fitting(connection, count, version, node, terms, draw)
    else:
        taken = list(_waiting(connection, version=version, count=count))
    for group in taken:
        set_group(connection, group.group_no, state)
    fresh = curriculum.make(connection, count - len(taken), terms.selection, draw.prompt, state)
    return taken + [GroupToLease(number) for number in fresh]


def _fitting(
    connection: sa.Connection, count: int, version: int | None, node: NodeId, terms: LeaseTerms, draw: PromptDraw
) -> list[GroupToLease]:
    """Return `count` open groups: those that this node can continue, then those that suit its pace."""
    begun = list(_begun_here(connection, version=version, count=count))
    left = count - len(begun)
    if not left:
        return begun
    window = foresight.window_of(connection, max(left, terms.lookahead), terms.selection, draw.prompt)
    waiting = {group.group_no: group for group in window}
    for group in begun:
        waiting.pop(group.group_no, None)
    speed = foresight.speed(connection, node)
    picked = lengths.pick(list(waiting.values()), left, speed=speed, window=terms.lookahead)
    return begun + [GroupToLease(number, waiting[number].begun, waiting[number].begun_version) for number in picked]


def _begin(
    source: PromptRef, samples: int, version: int, draw: PromptDraw, price: int, terms: LeaseTerms, now_ms: int
) -> Lease:
    prompt = pack_tokens(draw.prompt(source))
    return Lease(
        lease_id=draw.lease_id(),
        version=version,
        seed=draw.seed(),
        samples=samples or terms.samples_per_group,
        prompt=prompt,
        price_micros_per_mtok=price,
        expires_ms=now_ms + terms.timeout_ms,
        turn_tokens_max=terms.turn_tokens_max,
        context_tokens_paid=terms.context_tokens_paid(prompt, ()),
    )


def _continue_partials(
    connection: sa.Connection,
    group_no: int,
    partials: list[Told],
    draw: PromptDraw,
    price: int,
    terms: LeaseTerms,
    now_ms: int,
) -> Lease | None:
    """Return a lease that continues partial rollouts.

    Return None if that could cost more than a new start, or more than a query's key has left.
    """
    if not partials:
        return None
    last = partials[-1]
    most = last.lease.completion_max(terms.max_new_tokens)
    left = last.lease.samples * most - sum(len(prefix.tokens) // 4 for prefix in last.prefixes)
    begun_anew = terms.max_cost_micros(price, last.lease.samples, most)
    credited = sum(partial.pending.amount_micros for partial in partials)
    if credited + amount(left, price) > begun_anew:
        return None
    lease = _continue(last.lease, last.prefixes, draw, price, terms, now_ms)
    most_micros = credited + amount(left + lease.context_tokens_paid, price)
    return lease if queries.is_covered(connection, group_no, most_micros) else None


def _continue(
    lease: Lease, prefixes: tuple[Prefix, ...], draw: PromptDraw, price: int, terms: LeaseTerms, now_ms: int
) -> Lease:
    """Return a lease that continues `lease` after `prefixes`, with the same seed and version."""
    change = {
        "lease_id": draw.lease_id(),
        "price_micros_per_mtok": price,
        "expires_ms": now_ms + terms.timeout_ms,
        "prefixes": prefixes,
        "context_tokens_paid": terms.context_tokens_paid(lease.prompt, prefixes),
    }
    return lease.model_copy(update=change)


def _store(
    connection: sa.Connection,
    node: NodeId,
    group_no: int,
    lease: Lease,
    begun: str | None,
    terms: LeaseTerms,
    now_ms: int,
) -> None:
    price, tokens_max = lease.price_micros_per_mtok, lease.turn_tokens_max or lease.completion_max(terms.max_new_tokens)
    max_cost_micros = terms.max_cost_micros(price, lease.samples, tokens_max) + amount(lease.context_tokens_paid, price)
    given = {
        "lease_id": lease.lease_id,
        "group_no": group_no,
        "node_id": node,
        "continues": begun,
        "state": LeaseState.OFFERED.value,
        "max_cost_micros": max_cost_micros,
        "offer": lease.to_bytes(),
        "issued_ms": now_ms,
        "expires_ms": lease.expires_ms,
    }
    _give_lease(connection, **given)
    tally.change(connection, micros=max_cost_micros)
