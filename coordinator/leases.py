"""The lease table: who works on which group, as effects.

- A group is `open` (nobody works on it), `leased`, `accepted` or `trained`; a new one is made only when none is open.
- A lease that ends without acceptance opens its group again, so no prompt is lost; whoever takes the group next goes on
  from what was told of it, if that costs no more than to start afresh (`coordinator.continuation`).
- A node holds no more open leases than two requests' worth, nor than `coordinator.sizing` says of it.
- A lease is given out only if the free budget covers the dearest answer to it and to every open lease, and so does what
  is left of the hour's.
- A node that stands by (`coordinator.activation`) gets none; nor does anybody while auditors are too far behind.
- Every change of a lease goes through `protocol.lease.TRANSITIONS`, compared and set in one statement.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from coordinator import continuation, publish, registry, sizing, standings, stragglers
from coordinator.continuation import Told
from coordinator.dispatch import admissible_groups, is_stale
from coordinator.state import get_fact
from coordinator.tables import batches, groups, leases, nodes, parts, rollouts, versions
from ledger import store
from ledger.accounts import BUDGET
from ledger.entry import amount
from protocol import limits
from protocol.ids import NodeId
from protocol.lease import OPEN, TRANSITIONS, Event, Lease, State
from protocol.messages import LeaseReply, LeaseRequest, Reason, ReturnLeases
from protocol.rollout import pack_tokens

LEASES_HELD_FACTOR = 2
"""Requests' worth of open leases per node: one in the engine and one on its way; nobody can hold all the work."""

HOUR_MS = 3_600_000

IS_OPEN = leases.c.state.in_(OPEN)

AT_WORK = (State.ACCEPTED, State.REJECTED, State.EXPIRED)
"""Ends of leases that took the node's time; one that was skipped or cancelled need not have."""

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


@dataclass(frozen=True)
class Terms:
    """What the configuration says about leases."""

    staleness: int
    groups_per_update: int
    groups_per_request: int
    samples_per_group: int
    max_new_tokens: int
    timeout_ms: int
    newcomer_leases: int
    """How many a node may hold that has answered none yet."""
    over_issue: int
    """How many groups at most a second node gets, when a batch waits for no more than these."""
    hourly_budget_micros: int = 0
    """Most that may be spent in any hour; 0 is no limit."""
    max_owner_share: float = 1.0
    """Of what may be under way."""
    audit_backlog_max: int = 512
    """Claims that may wait for an auditor before no more are taken."""

    @property
    def held_max(self) -> int:
        """How many leases nobody may pass."""
        return LEASES_HELD_FACTOR * self.groups_per_request

    def max_cost_micros(self, price: int) -> int:
        """The dearest honest answer to one lease."""
        return amount(self.samples_per_group * self.max_new_tokens, price)


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
    visible_update = connection.execute(
        sa.select(versions.c.policy_update).where(versions.c.version == message.version)
    ).scalar()
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


def move(connection: sa.Connection, lease_id: str, event: Event, terms: Terms | None, now_ms: int) -> bool:
    """Move a lease by one event; False if it is not possible in the state it is in. Without terms, nobody learns."""
    row = connection.execute(sa.select(leases.c.state, leases.c.node_id).where(leases.c.lease_id == lease_id)).first()
    after = TRANSITIONS.get((State(row.state), event)) if row else None
    if row is None or after is None:
        return False
    here = (leases.c.lease_id == lease_id) & (leases.c.state == row.state)
    ended_ms = None if after in OPEN else now_ms
    if not connection.execute(sa.update(leases).where(here).values(state=after, ended_ms=ended_ms)).rowcount:
        return False
    if terms is not None and after not in OPEN:
        _learn(connection, row.node_id, event, terms)
    return True


def expire(connection: sa.Connection, *, terms: Terms, now_ms: int) -> int:
    """End the leases whose time is over and open their groups again."""
    over = connection.execute(
        sa.select(leases.c.lease_id, leases.c.group_no, leases.c.surplus).where(IS_OPEN, leases.c.expires_ms <= now_ms)
    ).all()
    for row in over:
        end_unanswered(connection, row, Event.EXPIRE, terms, now_ms)
    return len(over)


def give_back(connection: sa.Connection, node: NodeId, message: ReturnLeases, *, terms: Terms, now_ms: int) -> int:
    """A node skips leases that it will not answer; others' and finished ones are left alone."""
    skipped = 0
    for lease_id in message.lease_ids:
        mine = (leases.c.lease_id == lease_id) & (leases.c.node_id == node)
        columns = (leases.c.lease_id, leases.c.group_no, leases.c.surplus)
        row = connection.execute(sa.select(*columns).where(mine)).first()
        skipped += row is not None and end_unanswered(connection, row, Event.SKIP, terms, now_ms)
    return skipped


def end_unanswered(connection: sa.Connection, row: Any, event: Event, terms: Terms | None, now_ms: int) -> bool:
    """A lease ends; if its group still waits for it, that is offered again. One that is surplus is just cancelled."""
    if row.surplus:
        return move(connection, row.lease_id, Event.CANCEL, terms, now_ms)
    if not move(connection, row.lease_id, event, terms, now_ms):
        return False
    others = sa.select(leases.c.lease_id).where(leases.c.group_no == row.group_no, IS_OPEN).limit(1)
    if connection.execute(others).first() is None:
        sound = event is not Event.REJECT
        reopen(connection, row.group_no, continuation.left_by(connection, row.lease_id, sound=sound))
    return True


def answered(connection: sa.Connection, lease_id: str, group_no: int) -> None:
    """The group of this lease is whole: who else works on it does so in vain, and what they told is not needed."""
    here = (leases.c.group_no == group_no) & (leases.c.lease_id != lease_id)
    connection.execute(sa.update(leases).where(here, IS_OPEN).values(surplus=True))
    set_group(connection, group_no, "accepted")


def reopen(connection: sa.Connection, group_no: int, begun: str | None = None) -> None:
    """Offer a group again, to go on from that ended lease or afresh."""
    offer = connection.execute(sa.select(leases.c.offer).where(leases.c.lease_id == begun)).scalar()
    version = Lease.from_bytes(offer).version if offer else None
    values = {"state": "open", "begun": begun, "begun_version": version}
    connection.execute(sa.update(groups).where(groups.c.group_no == group_no).values(values))


def set_group(connection: sa.Connection, group_no: int, state: str) -> None:
    connection.execute(sa.update(groups).where(groups.c.group_no == group_no).values(state=state))


def latest_batch(connection: sa.Connection) -> int:
    """The update that the newest batch leads to: where the learner stands or is about to stand."""
    return connection.execute(sa.select(sa.func.max(batches.c.batch))).scalar() or 0


def _unfinished_groups(connection: sa.Connection) -> int:
    here = groups.c.state.in_(("leased", "accepted"))
    return connection.execute(sa.select(sa.func.count()).select_from(groups).where(here)).scalar_one()


def _held(connection: sa.Connection, node: NodeId) -> int:
    """How many leases the node has not answered yet."""
    here = (leases.c.node_id == node) & IS_OPEN
    return connection.execute(sa.select(sa.func.count()).select_from(leases).where(here)).scalar_one()


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


def _learn(connection: sa.Connection, node: NodeId, event: Event, terms: Terms) -> None:
    """A lease ended: its node may hold more from now on, or fewer."""
    here = nodes.c.node_id == node
    allowance = connection.execute(sa.select(nodes.c.lease_allowance).where(here)).scalar()
    before = terms.newcomer_leases if allowance is None else allowance
    after = sizing.allowance_after(before, event, most=terms.held_max)
    if after != allowance:
        connection.execute(sa.update(nodes).where(here).values(lease_allowance=after))


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
    free = store.balances(connection).get(BUDGET, 0)
    if terms.hourly_budget_micros:
        free = min(free, terms.hourly_budget_micros - _spent_since(connection, now_ms - HOUR_MS))
    reserved = connection.execute(
        sa.select(sa.func.coalesce(sa.func.sum(leases.c.max_cost_micros), 0)).where(IS_OPEN)
    ).scalar_one()
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
        barred = standings.banned_among(connection, [one.node_id for one in told])
        fits = message.continues and begun_version == version and not barred
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
    fits = sa.case((groups.c.begun_version == version, 0), (groups.c.begun.is_(None), 1), else_=2)
    waiting = sa.select(groups.c.group_no, groups.c.begun, groups.c.begun_version).where(groups.c.state == "open")
    found = connection.execute(waiting.order_by(fits, groups.c.group_no).limit(count))
    taken = [(row.group_no, row.begun, row.begun_version) for row in found]
    for group_no, _, _ in taken:
        set_group(connection, group_no, "leased")
    newest = connection.execute(sa.select(sa.func.max(groups.c.group_no))).scalar()
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
    connection.execute(
        sa.insert(leases).values(
            lease_id=lease.lease_id,
            group_no=group_no,
            node_id=node,
            continues=begun,
            state=State.OFFERED,
            max_cost_micros=terms.max_cost_micros(lease.price_micros_per_mtok),
            offer=lease.to_bytes(),
            issued_ms=now_ms,
            expires_ms=lease.expires_ms,
        )
    )
