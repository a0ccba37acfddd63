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
from dataclasses import dataclass, replace
from typing import NamedTuple

import sqlalchemy as sa

from coordinator.rules import lengths
from coordinator.rules.lifecycle import GroupState
from coordinator.rules.prompt_refs import QUERY, PromptRef
from coordinator.store.facts import get_fact
from coordinator.store.tables import IS_OPEN, groups, is_for_training, leases
from coordinator.transactions import (
    admission,
    audits,
    curriculum,
    evaluation_leases,
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


@dataclass(frozen=True)
class NodeRequest:
    """A node's request for leases, with all that the leases depend on."""

    node: NodeId
    message: LeaseRequest
    price: int
    """Credit in micro-units for a million tokens, with any bonus of the node's class."""
    terms: LeaseTerms
    draw: PromptDraw
    now_ms: int

    @property
    def continued_version(self) -> int | None:
        """The version with which the node can continue what others have begun; None if it cannot."""
        return self.message.version if self.message.continues else None

    def after(self, given: Sequence[Lease]) -> "NodeRequest":
        """Return the request for the groups that are left after these leases."""
        if not given:
            return self
        return replace(self, message=self.message.model_copy(update={"groups": self.message.groups - len(given)}))


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
    expire(connection, terms=terms, now_ms=now_ms)
    admitted = admission.how_many(connection, worker, message, terms, place, now_ms)
    request = NodeRequest(node, message, worker.price_micros_per_mtok, terms, draw, now_ms)
    served = _serve(connection, request, admitted)
    if served and admitted.on_trial:
        admitted = admitted._replace(trials=admitted.trials - len(served))
    request = request.after(served)
    measured, stays, alone = _measure(connection, request, admitted)
    request = request.after(measured)
    count = min(admitted.groups, request.message.groups)
    if measured and (alone or admitted.on_trial):
        count = 0
    groups = []
    if terms.turn_tokens_max and not alone:
        groups = _take_turns(connection, request, admitted)
        count = 0 if message.finishing else max(0, count - len(groups))  # both count what it may hold and cost
    groups += _take_groups(connection, request, count, GroupState.TRIAL if admitted.on_trial else GroupState.LEASED)
    if not groups and admitted.reason == "ahead" and not admitted.on_trial:
        groups = _late_groups(connection, request)
    given = served + measured + _give(connection, request, groups)
    if given and admitted.on_trial:
        newcomers.record_begun(connection, place, terms, now_ms)
    reason = "" if groups or given else admitted.reason
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
        message = LeaseRequest(version=version, groups=1, continues=True, numerics=turn.lease.judged_as)
        price = _paid_worker(connection, node, message.numerics, terms, now_ms).price_micros_per_mtok
        request = NodeRequest(node, message, price, terms, draw, now_ms)
        given += _give(connection, request, [GroupToLease(group_no, begun, version)])
    return tuple(given)


def _paid_worker(connection: sa.Connection, node: NodeId, numerics: str, terms: LeaseTerms, now_ms: int) -> WorkerRow:
    """Return the row of a node with the price that its leases name: the one that it asks, and any bonus of its class.

    The bonus is only for a node whose last judged work had the bits of its class, while an auditor of the round repeats
    that class: the name of a class is public, and would otherwise be worth claiming.
    """
    worker = registry.require_worker(connection, node)
    if not terms.exact_bonus or terms.judges_alike or not is_exact(numerics):
        return worker
    if not audits.is_proven_exact(connection, node, numerics, now_ms):
        return worker
    return worker._replace(price_micros_per_mtok=with_bonus(worker.price_micros_per_mtok, terms.exact_bonus))


def _take_turns(connection: sa.Connection, request: NodeRequest, admitted: Admitted) -> list[GroupToLease]:
    """Lease groups whose next turn waits for a node: those of its version, then those that waited in vain.

    A newcomer on trial gets none: it could spoil what others have played.
    """
    if admitted.on_trial or admitted.reason not in ("", *admission.NOT_NEEDED):
        return []
    message, terms = request.message, request.terms
    most = min(message.groups, terms.groups_per_request, _free_and_payable(connection, request))
    if most < 1:
        return []
    taken: list[GroupToLease] = []
    if message.continues:
        taken += _turns_here(connection, version=message.version, count=most)
    if admitted.groups and not message.finishing and len(taken) < most:
        taken += _turns_in_vain(connection, now=request.now_ms, count=most - len(taken))
    taken = list(dict.fromkeys(taken))
    for group in taken:
        set_group(connection, group.group_no, GroupState.LEASED)
    return taken


def _free_and_payable(connection: sa.Connection, request: NodeRequest) -> int:
    """Return how many more groups for training the node may hold, and the budget can pay at its price."""
    terms, now_ms = request.terms, request.now_ms
    return min(
        admission.free_hands(connection, request.node, terms, now_ms),
        admission.affordable(connection, terms, terms.max_cost_micros(request.price), now_ms),
    )


def _serve(connection: sa.Connection, request: NodeRequest, admitted: Admitted) -> list[Lease]:
    """Return leases of queries, which go before all other groups.

    A newcomer on trial gets none if the round trains: a group for training is its trial. Else a query is, and no caller
    reads its tokens before they are accepted.
    """
    message, terms, now_ms, on_trial = request.message, request.terms, request.now_ms, admitted.on_trial
    if not admitted.queries_wait or message.finishing or (on_trial and terms.trains):
        return []
    if admitted.reason not in ("", *admission.NOT_NEEDED) or admission.is_past(connection, message.version, terms):
        return []
    most = min(message.groups, terms.groups_per_request, admission.free_hands(connection, request.node, terms, now_ms))
    most = min(most, admitted.trials) if on_trial else most
    waiting = []
    if most > 0:
        price = request.price
        waiting = queries.waiting(connection, message.version, most, price=price, on_trial=on_trial, now_ms=now_ms)
    costs = [terms.max_cost_micros(request.price, query.samples, query.tokens_max) for query in waiting]
    payable = admission.affordable(connection, terms, max(costs, default=0), now_ms)
    taken = [GroupToLease(query.group_no, query.begun, query.begun_version) for query in waiting[:payable]]
    for group in taken:
        set_group(connection, group.group_no, GroupState.TRIAL if on_trial else GroupState.LEASED)
    return _give(connection, request, taken, is_read=not on_trial)


def _late_groups(connection: sa.Connection, request: NodeRequest) -> list[GroupToLease]:
    """Return groups that a batch waits for, which this node samples as the second one."""
    terms = request.terms
    if not request.message.groups or not terms.over_issue:
        return []
    late = stragglers.late_groups(
        connection,
        request.node,
        size=terms.groups_per_update,
        bound=terms.over_issue,
        plays=bool(terms.turn_tokens_max),
        now_ms=request.now_ms,
    )
    most = min(request.message.groups, _free_and_payable(connection, request))
    return _with_their_turns(connection, late[:most], request)


def _with_their_turns(connection: sa.Connection, late: Sequence[int], request: NodeRequest) -> list[GroupToLease]:
    """Return late groups for a second node: from their start, or from the turn that they have reached."""
    if not request.terms.turn_tokens_max:
        return [GroupToLease(group_no) for group_no in late]
    taken = list[GroupToLease]()
    for group_no in late:
        begun, begun_version = _begun_of(connection, group=group_no).single_row()
        if turns.last(connection, begun) is None:
            taken.append(GroupToLease(group_no))
        elif begun_version == request.continued_version:
            taken.append(GroupToLease(group_no, begun, begun_version))
    return taken


def _measure(connection: sa.Connection, request: NodeRequest, admitted: Admitted) -> EvaluationOffer:
    """Return leases of evaluation groups."""
    message, terms, now_ms, on_trial = request.message, request.terms, request.now_ms, admitted.on_trial
    if not message.groups or admitted.reason not in ("", *admission.NOT_NEEDED) or (on_trial and not admitted.trials):
        return EvaluationOffer([])
    asked = min(message.groups, terms.groups_per_request)
    asked = min(asked, admitted.trials) if on_trial else asked
    share, plays = terms.evaluation_share, bool(terms.turn_tokens_max)
    part = evaluation_leases.part(connection, request.node, message.version, asked, share, admitted, plays=plays)
    if part is None:
        return EvaluationOffer([])
    affordable = admission.affordable(connection, terms, terms.max_cost_micros(request.price, part.samples), now_ms)
    hands = min(part.most, admission.free_hands(connection, request.node, terms, now_ms), affordable)
    taken = evaluation_leases.lease_evaluation_groups(
        connection, part.evaluation, hands, request.continued_version, on_trial=on_trial
    )
    given = _give(connection, request, taken, samples=part.samples)
    stays = part.stays and bool(given) and evaluation_leases.is_left(connection, part.evaluation, on_trial=on_trial)
    return EvaluationOffer(given, stays, part.alone)


def _give(
    connection: sa.Connection,
    request: NodeRequest,
    taken: Sequence[GroupToLease],
    *,
    samples: int = 0,
    is_read: bool = True,
) -> list[Lease]:
    """Lease each group, while the leases fit into a message; continue what others have left, if this node can."""
    given: list[Lease] = []
    room_bytes = limits.MESSAGE_MAX_BYTES // 2
    judged_as = "" if request.terms.judges_alike else request.message.numerics
    for group in taken:
        lease, begun = _continued(connection, request, group), group.begun
        if lease is None:
            lease, begun = _begun_anew(connection, request, group.group_no, samples), None
        report_every_ms = lease.report_every_ms * is_read
        lease = lease.model_copy(update={"judged_as": judged_as, "report_every_ms": report_every_ms})
        room_bytes -= sum(len(prefix.tokens) for prefix in lease.prefixes)
        if room_bytes < 0:
            reopen(connection, group.group_no, begun)
        else:
            _store(connection, request, group.group_no, lease, begun)
            given.append(lease)
    return given


def _continued(connection: sa.Connection, request: NodeRequest, group: GroupToLease) -> Lease | None:
    """Return a lease that continues a group after its last turn, or after its partial rollouts.

    Return None if there is nothing to continue, or this node cannot or may not: then it is forgotten.
    """
    turn = turns.last(connection, group.begun)
    partials = [] if turn else partial_rollouts.chain(connection, group.begun)
    tellers = [partial.node_id for partial in partials]
    barred = standings.banned_among(connection, tellers) or registry.is_any_revoked(connection, tellers)
    lease = None
    if request.message.continues and group.begun_version == request.message.version and not barred:
        if turn:
            return _continue(request, turn.lease, turn.prefixes)
        lease = _continue_partials(connection, request, group.group_no, partials)
    if lease is None and turn is not None:
        turns.abandon(connection, group.group_no)
    if lease is None and partials:
        partial_rollouts.forget(connection, [partial.lease.lease_id for partial in partials])
    return lease


def _begun_anew(connection: sa.Connection, request: NodeRequest, group_no: int, samples: int) -> Lease:
    """Return a lease of a group from its start; `samples` is 0 for the round's number."""
    terms, draw = request.terms, request.draw
    source = curriculum.source_of(connection, group_no)
    if source.split == QUERY:
        return queries.first_lease(
            connection,
            source.number,
            lease_id=draw.lease_id(),
            version=request.message.version,
            seed=draw.seed(),
            price=request.price,
            terms=terms,
            now_ms=request.now_ms,
        )
    prompt = pack_tokens(draw.prompt(source))
    return Lease(
        lease_id=draw.lease_id(),
        version=request.message.version,
        seed=draw.seed(),
        samples=samples or terms.samples_per_group,
        prompt=prompt,
        price_micros_per_mtok=request.price,
        expires_ms=request.now_ms + terms.timeout_ms,
        turn_tokens_max=terms.turn_tokens_max,
        context_tokens_paid=terms.context_tokens_paid(prompt, ()),
    )


def _take_groups(connection: sa.Connection, request: NodeRequest, count: int, state: GroupState) -> list[GroupToLease]:
    """Set `count` groups that nobody works on to `state`; return each with the lease that left work and that version.

    Open groups that the node can continue come first, then the oldest; then new ones.
    """
    if not count:
        return []
    terms, draw = request.terms, request.draw
    if terms.lookahead:
        taken = _fitting(connection, request, count)
    else:
        taken = list(_waiting(connection, version=request.continued_version, count=count))
    for group in taken:
        set_group(connection, group.group_no, state)
    fresh = curriculum.make(connection, count - len(taken), terms.selection, draw.prompt, state)
    return taken + [GroupToLease(number) for number in fresh]


def _fitting(connection: sa.Connection, request: NodeRequest, count: int) -> list[GroupToLease]:
    """Return `count` open groups: those that this node can continue, then those that suit its pace."""
    terms = request.terms
    begun = list(_begun_here(connection, version=request.continued_version, count=count))
    left = count - len(begun)
    if not left:
        return begun
    window = foresight.window_of(connection, max(left, terms.lookahead), terms.selection, request.draw.prompt)
    waiting = {group.group_no: group for group in window}
    for group in begun:
        waiting.pop(group.group_no, None)
    speed = foresight.speed(connection, request.node)
    picked = lengths.pick(list(waiting.values()), left, speed=speed, window=terms.lookahead)
    return begun + [GroupToLease(number, waiting[number].begun, waiting[number].begun_version) for number in picked]


def _continue_partials(
    connection: sa.Connection, request: NodeRequest, group_no: int, partials: list[Told]
) -> Lease | None:
    """Return a lease that continues partial rollouts.

    Return None if that could cost more than a new start, or more than a query's key has left.
    """
    if not partials:
        return None
    last, price, terms = partials[-1], request.price, request.terms
    most = last.lease.completion_max(terms.max_new_tokens)
    left = last.lease.samples * most - sum(len(prefix.tokens) // 4 for prefix in last.prefixes)
    begun_anew = terms.max_cost_micros(price, last.lease.samples, most)
    credited = sum(partial.pending.amount_micros for partial in partials)
    if credited + amount(left, price) > begun_anew:
        return None
    lease = _continue(request, last.lease, last.prefixes)
    most_micros = credited + amount(left + lease.context_tokens_paid, price)
    return lease if queries.is_covered(connection, group_no, most_micros) else None


def _continue(request: NodeRequest, lease: Lease, prefixes: tuple[Prefix, ...]) -> Lease:
    """Return a lease that continues `lease` after `prefixes`, with the same seed and version."""
    change = {
        "lease_id": request.draw.lease_id(),
        "price_micros_per_mtok": request.price,
        "expires_ms": request.now_ms + request.terms.timeout_ms,
        "prefixes": prefixes,
        "context_tokens_paid": request.terms.context_tokens_paid(lease.prompt, prefixes),
    }
    return lease.model_copy(update=change)


def _store(connection: sa.Connection, request: NodeRequest, group_no: int, lease: Lease, begun: str | None) -> None:
    price, tokens_max = (
        lease.price_micros_per_mtok,
        lease.turn_tokens_max or lease.completion_max(request.terms.max_new_tokens),
    )
    max_cost_micros = request.terms.max_cost_micros(price, lease.samples, tokens_max) + amount(
        lease.context_tokens_paid, price
    )
    given = {
        "lease_id": lease.lease_id,
        "group_no": group_no,
        "node_id": request.node,
        "continues": begun,
        "state": LeaseState.OFFERED.value,
        "max_cost_micros": max_cost_micros,
        "offer": lease.to_bytes(),
        "issued_ms": request.now_ms,
        "expires_ms": lease.expires_ms,
    }
    _give_lease(connection, **given)
    tally.change(connection, micros=max_cost_micros)
