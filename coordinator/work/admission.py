"""How many groups a node may take now, or why it may take none, as effects.

- The staleness bound counts by the version that the node holds (`coordinator.work.dispatch`).
- A lease is given out only if the free budget covers the dearest answer to it and to every open lease, and so does what
  is left of the hour's.
- A node that stands by (`coordinator.fleet.activation`) gets none; nor does anybody while auditors are too far behind.
"""

import sqlalchemy as sa

from coordinator.people import registry, standings
from coordinator.store.state import get_fact
from coordinator.store.tables import IS_OPEN, leases, nodes, parts, rollouts, versions
from coordinator.work import sizing, tally
from coordinator.work.dispatch import admissible_groups, is_stale, room_in_buffer
from coordinator.work.leases import Terms, is_held_up, latest_batch
from ledger import store
from ledger.accounts import BUDGET
from ledger.prepared import Prepared
from protocol.errors import UnknownEnvironment
from protocol.ids import NodeId
from protocol.lease import State
from protocol.messages import LeaseRequest, Reason

HOUR_MS = 3_600_000

# Built once: making a statement costs more than running it, and these run for every lease.
_policy_update = Prepared(sa.select(versions.c.policy_update).where(versions.c.version == sa.bindparam("version")))
_newest_update = Prepared(sa.select(versions.c.policy_update).order_by(versions.c.version.desc()).limit(1))
_held_by = Prepared(
    sa.select(sa.func.count()).select_from(leases).where(IS_OPEN, leases.c.node_id == sa.bindparam("node"))
)
_allowance = Prepared(sa.select(nodes.c.lease_allowance).where(nodes.c.node_id == sa.bindparam("node")))
_lately = Prepared(
    sa.select(leases.c.issued_ms, leases.c.ended_ms)
    .where(leases.c.node_id == sa.bindparam("node"), leases.c.state == State.ACCEPTED.value)
    .order_by(leases.c.ended_ms.desc())
    .limit(sizing.MEASURED_MAX)
)


def require_plays(message: LeaseRequest, environment: str) -> None:
    """Refuse a node that could not play what it would be given."""
    if environment and environment not in message.environments:
        raise UnknownEnvironment(
            f"This round plays {environment!r}, which this node's engine cannot.",
            hint="Update echo-swarm, or start the node with `--engine torch` or `--engine llama`.",
        )


def how_many(
    connection: sa.Connection, node: NodeId, message: LeaseRequest, newest: int, price: int, terms: Terms, now_ms: int
) -> tuple[int, Reason]:
    """The number of groups a node may take now, or why it may take none."""
    if get_fact(connection, "finished", False):
        return 0, "finished"
    if terms.classes and message.numerics not in terms.classes:
        return 0, "numerics"
    if not registry.works(connection, node):
        return 0, "standby"
    if standings.backlog(connection) >= terms.audit_backlog_max:
        return 0, "audits"
    visible_update = _policy_update(connection, version=message.version).scalar()
    learner_update = latest_batch(connection)
    if visible_update is None or is_stale(
        staleness=terms.staleness, policy_update=visible_update, learner_update=learner_update
    ):
        return 0, "old_version"
    unfinished = tally.read(connection).unfinished
    window = _window(terms, visible_update, learner_update, 0)
    admissible = min(
        _window(terms, visible_update, learner_update, unfinished),
        _share_left(connection, node, window, terms, now_ms),
    )
    if not admissible:
        return 0, "ahead" if message.version >= newest else "old_version"
    hands = free_hands(connection, node, terms)
    if not hands:
        return 0, "busy"
    payable = affordable(connection, terms, price, now_ms)
    if not payable:
        return 0, "budget"
    return min(message.groups, terms.groups_per_request, admissible, payable, hands), ""


def room(connection: sa.Connection, terms: Terms) -> int:
    """How many more groups may start for whoever holds the newest version."""
    newest = _newest_update(connection).scalar()
    if newest is None:
        return 0
    return _window(terms, newest, latest_batch(connection), tally.read(connection).unfinished)


def _window(terms: Terms, visible_update: int, learner_update: int, unfinished: int) -> int:
    """How many groups may start beside so many that are under way or wait."""
    if terms.buffered_max:
        return room_in_buffer(
            buffered_max=terms.buffered_max, groups_per_update=terms.groups_per_update, unfinished_groups=unfinished
        )
    return admissible_groups(
        staleness=terms.staleness,
        groups_per_update=terms.groups_per_update,
        visible_update=visible_update,
        issued_groups=learner_update * terms.groups_per_update + unfinished,
    )


def _held(connection: sa.Connection, node: NodeId) -> int:
    """How many leases the node has not answered yet."""
    return int(_held_by(connection, node=node).scalar_one())


def free_hands(connection: sa.Connection, node: NodeId, terms: Terms) -> int:
    return max(0, _may_hold(connection, node, terms) - _held(connection, node))


def _may_hold(connection: sa.Connection, node: NodeId, terms: Terms) -> int:
    """How many leases the node may hold by what became of those that it had."""
    allowance = _allowance(connection, node=node).scalar()
    lately = _lately(connection, node=node)
    in_time = sizing.groups_in_time(lately, timeout_ms=terms.timeout_ms)
    return min(
        terms.held_max,
        terms.newcomer_leases if allowance is None else allowance,
        terms.held_max if in_time is None else in_time,
    )


def _share_left(connection: sa.Connection, node: NodeId, window: int, terms: Terms, now_ms: int) -> int:
    """How many more of the groups under way may be this owner's; any while the learner waits in vain for others'."""
    if terms.max_owner_share >= 1:
        return window
    most = standings.share_of(connection, window, terms.max_owner_share)
    left = max(0, most - standings.at_work(connection, standings.owner_of(connection, node)))
    return left or (window if is_held_up(connection, terms, now_ms) else 0)


def affordable(connection: sa.Connection, terms: Terms, price: int, now_ms: int, samples: int = 0) -> int:
    """How many more leases the free budget, and what is left of the hour's, cover at their dearest."""
    max_cost = terms.max_cost_micros(price, samples)
    if not max_cost:
        return 2**31
    free = store.balance(connection, BUDGET)
    if terms.hourly_budget_micros:
        free = min(free, terms.hourly_budget_micros - _spent_since(connection, now_ms - HOUR_MS))
    # Below zero after a restart with dearer terms; a negative count would take every open group.
    return max(0, (free - tally.read(connection).reserved_micros) // max_cost)


def _spent_since(connection: sa.Connection, since_ms: int) -> int:
    """What was credited for the answers since then, voided later or not."""
    ended = sa.select(leases.c.lease_id).where(leases.c.ended_ms > since_ms, leases.c.state == State.ACCEPTED)
    spent = sa.select(sa.func.coalesce(sa.func.sum(rollouts.c.credit_micros), 0)).where(rollouts.c.lease_id.in_(ended))
    for_parts = sa.select(sa.func.coalesce(sa.func.sum(parts.c.credit_micros), 0)).where(parts.c.credited_ms > since_ms)
    return int(connection.execute(spent).scalar_one()) + int(connection.execute(for_parts).scalar_one())
