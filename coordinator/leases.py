"""The lease table: who works on which group, as effects.

- A group is `open` (nobody works on it), `leased`, `accepted` or `trained`; a new one is made only when none is open.
- A lease that ends without acceptance opens its group again, so no prompt is lost.
- A node holds no more open leases than two requests' worth.
- A lease is given out only if the free budget covers the dearest answer to it and to every open lease, and so does what
  is left of the hour's.
- A node that stands by (`coordinator.activation`) gets none.
- Every change of a lease goes through `protocol.lease.TRANSITIONS`, compared and set in one statement.
"""

from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa

from coordinator import publish, registry
from coordinator.dispatch import admissible_groups, is_stale
from coordinator.state import get_fact
from coordinator.tables import batches, groups, leases, rollouts, versions
from ledger import store
from ledger.accounts import BUDGET
from ledger.entry import amount
from protocol.ids import NodeId
from protocol.lease import TRANSITIONS, Event, Lease, State
from protocol.messages import LeaseReply, LeaseRequest, Reason, ReturnLeases
from protocol.rollout import pack_tokens

LEASES_HELD_FACTOR = 2
"""Requests' worth of open leases per node: one in the engine and one on its way; nobody can hold all the work."""

HOUR_MS = 3_600_000

RETRY_S: dict[Reason, float] = {
    "": 0.0,
    "ahead": 0.0,
    "old_version": 1.0,
    "standby": 5.0,
    "budget": 10.0,
    "finished": 1.0,
}
"""When to ask again, by why there was nothing."""


# Built once: making a statement costs more than running it, and these run for every lease.
_open = leases.c.state == sa.literal(State.OPEN.value, literal_execute=True)  # written out: partial indexes want it
_over = sa.select(leases.c.lease_id, leases.c.group_no).where(_open, leases.c.expires_ms <= sa.bindparam("now"))
_policy_update = sa.select(versions.c.policy_update).where(versions.c.version == sa.bindparam("version"))
_latest_batch = sa.select(sa.func.max(batches.c.batch))
_unfinished = sa.select(sa.func.count()).select_from(groups).where(groups.c.state.in_(("leased", "accepted")))
_held_by = sa.select(sa.func.count()).select_from(leases).where(_open, leases.c.node_id == sa.bindparam("node"))
_reserved = sa.select(sa.func.coalesce(sa.func.sum(leases.c.max_cost_micros), 0)).where(_open)
_newest_group = sa.select(sa.func.max(groups.c.group_no))
_waiting = (
    sa.select(groups.c.group_no)
    .where(groups.c.state == "open")
    .order_by(groups.c.group_no)
    .limit(sa.bindparam("count", type_=sa.Integer))
)
_set_group = sa.update(groups).where(groups.c.group_no == sa.bindparam("group")).values(state=sa.bindparam("new"))
_close = (
    sa.update(leases)
    .where(leases.c.lease_id == sa.bindparam("lease"), leases.c.state == sa.bindparam("before"))
    .values(state=sa.bindparam("after"), ended_ms=sa.bindparam("now"))
)
_give = sa.insert(leases)


@dataclass(frozen=True)
class Terms:
    """What the configuration says about leases."""

    staleness: int
    groups_per_update: int
    groups_per_request: int
    samples_per_group: int
    max_new_tokens: int
    timeout_ms: int
    hourly_budget_micros: int = 0
    """Most that may be spent in any hour; 0 is no limit."""

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
    expire(connection, now_ms)
    newest, _ = publish.newest_version(connection)
    count, reason = _how_many(connection, node, message, newest, price, terms, now_ms)
    given = [
        _lease(connection, node, group, message.version, price, terms, draw, now_ms)
        for group in _take_groups(connection, count)
    ]
    return LeaseReply(leases=tuple(given), newest_version=newest, reason=reason, retry_s=RETRY_S[reason])


def _how_many(
    connection: sa.Connection, node: NodeId, message: LeaseRequest, newest: int, price: int, terms: Terms, now_ms: int
) -> tuple[int, Reason]:
    """The number of groups a node may take now, or why it may take none."""
    if get_fact(connection, "finished", False):
        return 0, "finished"
    if not registry.works(connection, node):
        return 0, "standby"
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
    free_hands = LEASES_HELD_FACTOR * terms.groups_per_request - _held(connection, node)
    if not admissible or free_hands <= 0:
        return 0, "ahead" if message.version >= newest else "old_version"
    affordable = _affordable(connection, terms, price, now_ms)
    if not affordable:
        return 0, "budget"
    return min(message.groups, terms.groups_per_request, admissible, affordable, free_hands), ""


def close(connection: sa.Connection, lease_id: str, event: Event, now_ms: int) -> bool:
    """Move a lease by one event; False if the event is not possible in the state it is in."""
    for (before, happening), after in TRANSITIONS.items():
        if happening is event:
            change = {"lease": lease_id, "before": before.value, "after": after.value, "now": now_ms}
            if connection.execute(_close, change).rowcount:
                return True
    return False


def expire(connection: sa.Connection, now_ms: int) -> int:
    """End the leases whose time is over and open their groups again."""
    over = connection.execute(_over, {"now": now_ms}).all()
    for lease_id, group_no in over:
        if close(connection, lease_id, Event.EXPIRE, now_ms):
            set_group(connection, group_no, "open")
    return len(over)


def give_back(connection: sa.Connection, node: NodeId, message: ReturnLeases, *, now_ms: int) -> int:
    """A node returns leases that it will not answer; others' and finished ones are left alone."""
    returned = 0
    for lease_id in message.lease_ids:
        mine = (leases.c.lease_id == lease_id) & (leases.c.node_id == node)
        group_no = connection.execute(sa.select(leases.c.group_no).where(mine)).scalar()
        if group_no is not None and close(connection, lease_id, Event.RETURN, now_ms):
            set_group(connection, group_no, "open")
            returned += 1
    return returned


def set_group(connection: sa.Connection, group_no: int, state: str) -> None:
    connection.execute(_set_group, {"group": group_no, "new": state})


def latest_batch(connection: sa.Connection) -> int:
    """The update that the newest batch leads to: where the learner stands or is about to stand."""
    return connection.execute(_latest_batch).scalar() or 0


def _unfinished_groups(connection: sa.Connection) -> int:
    return connection.execute(_unfinished).scalar_one()


def _held(connection: sa.Connection, node: NodeId) -> int:
    """How many leases the node has not answered yet."""
    return connection.execute(_held_by, {"node": node}).scalar_one()


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
    ended = sa.select(leases.c.lease_id).where(leases.c.ended_ms > since_ms, leases.c.state == State.ACCEPTED.value)
    spent = sa.select(sa.func.coalesce(sa.func.sum(rollouts.c.credit_micros), 0)).where(rollouts.c.lease_id.in_(ended))
    return int(connection.execute(spent).scalar_one())


def _take_groups(connection: sa.Connection, count: int) -> list[int]:
    """Groups that nobody works on: the oldest open ones first, then new ones."""
    if not count:
        return []
    taken = [row[0] for row in connection.execute(_waiting, {"count": count})]
    for group_no in taken:
        set_group(connection, group_no, "leased")
    newest = connection.execute(_newest_group).scalar()
    first = 0 if newest is None else newest + 1
    fresh = list(range(first, first + count - len(taken)))
    if fresh:
        connection.execute(sa.insert(groups), [{"group_no": number, "state": "leased"} for number in fresh])
    return taken + fresh


def _lease(
    connection: sa.Connection,
    node: NodeId,
    group_no: int,
    version: int,
    price: int,
    terms: Terms,
    draw: Draw,
    now_ms: int,
) -> Lease:
    lease = Lease(
        lease_id=draw.lease_id(),
        version=version,
        seed=draw.seed(),
        samples=terms.samples_per_group,
        prompt=pack_tokens(draw.prompt(group_no)),
        price_micros_per_mtok=price,
        expires_ms=now_ms + terms.timeout_ms,
    )
    given = {
        "lease_id": lease.lease_id,
        "group_no": group_no,
        "node_id": node,
        "state": State.OPEN.value,
        "max_cost_micros": terms.max_cost_micros(price),
        "offer": lease.to_bytes(),
        "issued_ms": now_ms,
        "expires_ms": lease.expires_ms,
    }
    connection.execute(_give, given)
    return lease
