"""What a node is offered: which groups, how many, and where it goes on, as effects.

- The oldest open groups go first; a new one is made only when none is open.
- A lease is given out only if the free budget covers the dearest answer to it and to every open lease, and so does what
  is left of the hour's.
- A node that stands by (`coordinator.activation`) gets none; nor does anybody while auditors are too far behind.
- When a batch waits only for a few late groups, these are given to a second node (`coordinator.stragglers`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa

from coordinator import continuation, publish, registry, sizing, standings, stragglers
from coordinator.continuation import Told
from coordinator.dispatch import admissible_groups, is_stale
from coordinator.leases import IS_OPEN, Terms, expire, latest_batch, reopen, set_group
from coordinator.state import get_fact
from coordinator.tables import groups, leases, nodes, parts, rollouts, versions
from ledger import store
from ledger.accounts import BUDGET
from ledger.entry import amount
from protocol import limits
from protocol.ids import NodeId
from protocol.lease import Lease, State
from protocol.messages import LeaseReply, LeaseRequest, Reason
from protocol.rollout import pack_tokens

HOUR_MS = 3_600_000

RETRY_S: dict[Reason, float] = {
    "": 0.0,
    "ahead": 0.0,
    "busy": 0.25,
    "old_version": 1.0,
    "standby": 5.0,
    "budget": 10.0,
    "audits": 1.0,
    "finished": 1.0,
}
"""When to ask again, by why there was nothing."""

# Built once: making a statement costs more than running it, and these run for every lease.
_policy_update = sa.select(versions.c.policy_update).where(versions.c.version == sa.bindparam("version"))
_unfinished = sa.select(sa.func.count()).select_from(groups).where(groups.c.state.in_(("leased", "accepted")))
_held_by = sa.select(sa.func.count()).select_from(leases).where(IS_OPEN, leases.c.node_id == sa.bindparam("node"))
_reserved = sa.select(sa.func.coalesce(sa.func.sum(leases.c.max_cost_micros), 0)).where(IS_OPEN)
_newest_group = sa.select(sa.func.max(groups.c.group_no))
_fits = sa.case(
    (groups.c.begun_version == sa.bindparam("version", type_=sa.Integer), 0), (groups.c.begun.is_(None), 1), else_=2
)
_waiting = (
    sa.select(groups.c.group_no, groups.c.begun, groups.c.begun_version)
    .where(groups.c.state == "open")
    .order_by(_fits, groups.c.group_no)
    .limit(sa.bindparam("count", type_=sa.Integer))
)
_give_lease = sa.insert(leases)


@dataclass(frozen=True)
class Draw:
    """Where prompts and random values come from."""

    prompt: Callable[[int], list[int]]
    """The prompt's tokens of a group number."""
    lease_id: Callable[[], str]
    seed: Callable[[], int]


def offer(
    connection: sa.Connection, node: NodeId, message: LeaseRequest, *, terms: Terms, draw: Draw, now_ms: int
) -> LeaseReply:
    """Give a node as many groups as the staleness bound, the budget and its request allow."""
    price = registry.require_node(connection, node)
    standings.require_allowed(connection, node)
    expire(connection, terms=terms, now_ms=now_ms)
    newest, _ = publish.newest_version(connection)
    count, reason = _how_many(connection, node, message, newest, price, terms, now_ms)
    groups = _take_groups(connection, count, message.version if message.continues else None)
    if reason == "ahead" and terms.over_issue:
        late = stragglers.late_groups(
            connection, node, size=terms.groups_per_update, bound=terms.over_issue, now_ms=now_ms
        )
        hands = min(message.groups, _free_hands(connection, node, terms), _affordable(connection, terms, price, now_ms))
        groups = [(group_no, None, None) for group_no in late[:hands]]
        reason = "" if groups else reason
    given = _give(connection, node, groups, message, price, terms, draw, now_ms)
    return LeaseReply(leases=tuple(given), newest_version=newest, reason=reason, retry_s=RETRY_S[reason])


def _how_many(
    connection: sa.Connection, node: NodeId, message: LeaseRequest, newest: int, price: int, terms: Terms, now_ms: int
) -> tuple[int, Reason]:
    """The number of groups a node may take now, or why it may take none."""
    if get_fact(connection, "finished", False):
        return 0, "finished"
    if not registry.works(connection, node):
        return 0, "standby"
    if standings.backlog(connection) >= terms.audit_backlog_max:
        return 0, "audits"
    visible_update = connection.execute(_policy_update, {"version": message.version}).scalar()
    learner_update = latest_batch(connection)
    if visible_update is None or is_stale(
        staleness=terms.staleness, policy_update=visible_update, learner_update=learner_update
    ):
        return 0, "old_version"
    admissible = admissible_groups(
        staleness=terms.staleness,
        groups_per_update=terms.groups_per_update,
        visible_update=visible_update,
        issued_groups=learner_update * terms.groups_per_update + _unfinished_groups(connection),
    )
    window = admissible_groups(
        staleness=terms.staleness,
        groups_per_update=terms.groups_per_update,
        visible_update=visible_update,
        issued_groups=learner_update * terms.groups_per_update,
    )
    admissible = min(admissible, _share_left(connection, node, window, terms.max_owner_share))
    if not admissible:
        return 0, "ahead" if message.version >= newest else "old_version"
    free_hands = _free_hands(connection, node, terms)
    if not free_hands:
        return 0, "busy"
    affordable = _affordable(connection, terms, price, now_ms)
    if not affordable:
        return 0, "budget"
    return min(message.groups, terms.groups_per_request, admissible, affordable, free_hands), ""


def _unfinished_groups(connection: sa.Connection) -> int:
    return connection.execute(_unfinished).scalar_one()


def _held(connection: sa.Connection, node: NodeId) -> int:
    """How many leases the node has not answered yet."""
    return connection.execute(_held_by, {"node": node}).scalar_one()


def _free_hands(connection: sa.Connection, node: NodeId, terms: Terms) -> int:
    return max(0, _may_hold(connection, node, terms) - _held(connection, node))


def _may_hold(connection: sa.Connection, node: NodeId, terms: Terms) -> int:
    """How many leases the node may hold by what became of those that it had."""
    allowance = connection.execute(sa.select(nodes.c.lease_allowance).where(nodes.c.node_id == node)).scalar()
    lately = (
        sa.select(leases.c.issued_ms, leases.c.ended_ms)
        .where(leases.c.node_id == node, leases.c.state == State.ACCEPTED)
        .order_by(leases.c.ended_ms.desc())
        .limit(sizing.MEASURED_MAX)
    )
    in_time = sizing.groups_in_time(connection.execute(lately).all(), timeout_ms=terms.timeout_ms)
    return min(
        terms.held_max,
        terms.newcomer_leases if allowance is None else allowance,
        terms.held_max if in_time is None else in_time,
    )


def _share_left(connection: sa.Connection, node: NodeId, window: int, share: float) -> int:
    """How many more of the groups under way may be this owner's."""
    if share >= 1:
        return window
    at_work = standings.owners_at_work(connection)
    owner = standings.owner_of(connection, node)
    return max(0, standings.share_of(window, share, len(at_work)) - at_work[owner])


def _affordable(connection: sa.Connection, terms: Terms, price: int, now_ms: int) -> int:
    """How many more leases the free budget, and what is left of the hour's, cover at their dearest."""
    max_cost = terms.max_cost_micros(price)
    if not max_cost:
        return 2**31
    free = store.balance(connection, BUDGET)
    if terms.hourly_budget_micros:
        free = min(free, terms.hourly_budget_micros - _spent_since(connection, now_ms - HOUR_MS))
    reserved = connection.execute(_reserved).scalar_one()
    # Below zero after a restart with dearer terms; a negative count would take every open group.
    return max(0, (free - int(reserved)) // max_cost)


def _spent_since(connection: sa.Connection, since_ms: int) -> int:
    """What was credited for the answers since then, voided later or not."""
    ended = sa.select(leases.c.lease_id).where(leases.c.ended_ms > since_ms, leases.c.state == State.ACCEPTED)
    spent = sa.select(sa.func.coalesce(sa.func.sum(rollouts.c.credit_micros), 0)).where(rollouts.c.lease_id.in_(ended))
    for_parts = sa.select(sa.func.coalesce(sa.func.sum(parts.c.credit_micros), 0)).where(parts.c.credited_ms > since_ms)
    return int(connection.execute(spent).scalar_one()) + int(connection.execute(for_parts).scalar_one())


def _give(
    connection: sa.Connection,
    node: NodeId,
    taken: list[tuple[int, str | None, int | None]],
    message: LeaseRequest,
    price: int,
    terms: Terms,
    draw: Draw,
    now_ms: int,
) -> list[Lease]:
    """A lease of each group, as long as they fit into a message: where others stopped, if this node can go on."""
    given: list[Lease] = []
    room_bytes = limits.MESSAGE_MAX_BYTES // 2
    version = message.version
    for group_no, begun, begun_version in taken:
        told = continuation.chain(connection, begun)
        fits = message.continues and begun_version == version
        lease = _go_on(told, draw, price, terms, now_ms) if fits else None
        if lease is None:
            if told:
                continuation.forget(connection, [one.lease.lease_id for one in told])
            lease, begun = _begin(group_no, version, draw, price, terms, now_ms), None
        room_bytes -= sum(len(prefix.tokens) for prefix in lease.prefixes)
        if room_bytes < 0:
            reopen(connection, group_no, begun)
        else:
            _store(connection, node, group_no, lease, begun, terms, now_ms)
            given.append(lease)
    return given


def _take_groups(
    connection: sa.Connection, count: int, version: int | None
) -> list[tuple[int, str | None, int | None]]:
    """So many groups that nobody works on, each with the lease that left its work and the version of that.

    Of the open ones, those to go on with come first, then the oldest; then new ones.
    """
    if not count:
        return []
    found = connection.execute(_waiting, {"version": version, "count": count})
    taken = [(row.group_no, row.begun, row.begun_version) for row in found]
    for group_no, _, _ in taken:
        set_group(connection, group_no, "leased")
    newest = connection.execute(_newest_group).scalar()
    first = 0 if newest is None else newest + 1
    fresh = list(range(first, first + count - len(taken)))
    if fresh:
        connection.execute(sa.insert(groups), [{"group_no": number, "state": "leased"} for number in fresh])
    return taken + [(number, None, None) for number in fresh]


def _begin(group_no: int, version: int, draw: Draw, price: int, terms: Terms, now_ms: int) -> Lease:
    return Lease(
        lease_id=draw.lease_id(),
        version=version,
        seed=draw.seed(),
        samples=terms.samples_per_group,
        prompt=pack_tokens(draw.prompt(group_no)),
        price_micros_per_mtok=price,
        expires_ms=now_ms + terms.timeout_ms,
    )


def _go_on(told: list[Told], draw: Draw, price: int, terms: Terms, now_ms: int) -> Lease | None:
    """A lease from where others stopped, unless that could cost more than to start afresh."""
    if not told:
        return None
    last = told[-1]
    left = terms.samples_per_group * terms.max_new_tokens - sum(len(prefix.tokens) // 4 for prefix in last.prefixes)
    if sum(one.pending.amount_micros for one in told) + amount(left, price) > terms.max_cost_micros(price):
        return None
    change = {
        "lease_id": draw.lease_id(),
        "price_micros_per_mtok": price,
        "expires_ms": now_ms + terms.timeout_ms,
        "prefixes": last.prefixes,
    }
    return last.lease.model_copy(update=change)


def _store(
    connection: sa.Connection,
    node: NodeId,
    group_no: int,
    lease: Lease,
    begun: str | None,
    terms: Terms,
    now_ms: int,
) -> None:
    given = {
        "lease_id": lease.lease_id,
        "group_no": group_no,
        "node_id": node,
        "continues": begun,
        "state": State.OFFERED.value,
        "max_cost_micros": terms.max_cost_micros(lease.price_micros_per_mtok),
        "offer": lease.to_bytes(),
        "issued_ms": now_ms,
        "expires_ms": lease.expires_ms,
    }
    connection.execute(_give_lease, given)
