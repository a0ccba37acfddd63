"""What newcomers may hold together, as effects: keys are free, so there may be any number of them.

- A newcomer is a node whose owner has no group yet that was found right. After a hard fault an owner is one again.
- In a round that begins, everybody is a newcomer, and they have all the room there is.
- While others ask, newcomers hold a part of the window together and one lease each, until an audit has found their
  first group right; and who let leases expire waits, twice as long after each. So it is with what is measured: of an
  evaluation they hold a part together, and a lease of it is their one.
"""

from math import ceil
from typing import Any

import sqlalchemy as sa

from coordinator.people import standings
from coordinator.store.state import get_fact, set_fact
from coordinator.store.tables import IS_OPEN, groups, leases, nodes
from coordinator.work import sizing
from coordinator.work.leases import Terms, last_expired_ms
from ledger.prepared import Prepared
from protocol.ids import NodeId

SHARE = 0.25
"""Of the window, while others ask."""

OTHERS = "others_asked_ms"
"""The fact of when somebody who is no newcomer last asked; noted anew after a lease's time, and good for two."""

# Built once: making a statement costs more than running it, and these run for every lease.
_this = nodes.c.node_id == sa.bindparam("node")
_out = IS_OPEN & (leases.c.group_no >= 0)
# No more are counted than are asked for.
_held = Prepared(
    sa.select(sa.func.count()).select_from(
        sa.select(leases.c.lease_id)
        .join_from(leases, nodes, nodes.c.node_id == leases.c.node_id)
        .where(_out, ~standings.IS_KNOWN)
        .limit(sa.bindparam("enough", type_=sa.Integer))
        .subquery()
    )
)
_measured = Prepared(
    sa.select(sa.func.count())
    .select_from(leases)
    .join(nodes, nodes.c.node_id == leases.c.node_id)
    .join(groups, groups.c.group_no == leases.c.group_no)
    .where(IS_OPEN, ~standings.IS_KNOWN, groups.c.evaluation == sa.bindparam("evaluation"))
)
_holds = sa.exists().where(IS_OPEN, leases.c.node_id == nodes.c.node_id).label("holds")
_own = Prepared(sa.select(nodes.c.lease_allowance, _holds).where(_this))


def part(
    connection: sa.Connection, worker: Any, others_ms: int | None, window: int, left: int, terms: Terms, now_ms: int
) -> int:
    """How many of the groups of a window that are left this node may take: all, unless it is a newcomer.

    `others_ms` is the fact `OTHERS`, if there is one.
    """
    if worker.is_known:
        if others_ms is None or others_ms <= now_ms - terms.timeout_ms:
            set_fact(connection, OTHERS, now_ms)
        return left
    if others_ms is None or others_ms <= now_ms - 2 * terms.timeout_ms:
        return left
    if not left or _must_wait(connection, worker.node_id, terms, now_ms):
        return 0
    places = ceil(SHARE * window)
    return min(1, places - int(_held(connection, enough=places).scalar_one()))


def to_measure(
    connection: sa.Connection, worker: Any, evaluation: int, problems: int, terms: Terms, now_ms: int
) -> int:
    """How many groups of an evaluation of so many this node may take: all, unless it is a newcomer beside others."""
    others_ms = None if worker.is_known else get_fact(connection, OTHERS)
    if others_ms is None or others_ms <= now_ms - 2 * terms.timeout_ms:
        return problems
    if _must_wait(connection, worker.node_id, terms, now_ms):
        return 0
    return max(0, min(1, ceil(SHARE * problems) - int(_measured(connection, evaluation=evaluation).scalar_one())))


def _must_wait(connection: sa.Connection, node: NodeId, terms: Terms, now_ms: int) -> bool:
    """Whether a newcomer holds a lease, or must wait for what it let expire."""
    own = _own(connection, node=node).one()
    at_first = min(terms.held_max, terms.newcomer_leases)
    misses = 0 if own.lease_allowance is None else at_first - own.lease_allowance
    wait_ms = sizing.wait_ms(misses, timeout_ms=terms.timeout_ms)
    return bool(own.holds) or (wait_ms > 0 and last_expired_ms(connection, node) > now_ms - wait_ms)
