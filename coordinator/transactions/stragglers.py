"""Stragglers: groups that a batch waits for, given to a second node.

- They are given only when the learner is free and lacks at most `bound` groups, and at most `bound` at once.
- Groups on trial (`coordinator.transactions.newcomers`) are never given: the learner does not wait for these.
- A group is late when it has been leased for `LATE` times as long as groups lately took; the second node must be no
  slower than groups lately took.
- The first valid answer counts. The second node is not blamed: it is paid if it answers within its lease's time, and
  the lease is cancelled when it next reports its progress.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import sqlalchemy as sa

from coordinator.rules.lease_allowance import MEASURED_MAX
from coordinator.rules.lifecycle import WAITING, GroupState, RolloutState
from coordinator.store.tables import IS_OPEN, batches, groups, is_for_training, leases, rollouts
from protocol.ids import NodeId
from protocol.work.lease import LeaseState

LATE = 1.5
"""The factor on the time that groups lately took, after which a group is late."""


@dataclass(frozen=True)
class GroupAtWork:
    """A group at work: since when, on how many nodes, and whether the node that asks is among them."""

    group_no: int
    since_s: float
    nodes: int = 1
    own: bool = False


def choose(
    out: Iterable[GroupAtWork], *, missing: int, bound: int, typical_s: float, helper_s: float, now_s: float
) -> list[int]:
    """Return the late groups that a free node may be given, the latest first; it needs `helper_s` for one. Pure."""
    if not 0 < missing <= bound or helper_s > typical_s:
        return []
    groups = list(out)
    late = [
        group for group in groups if group.nodes == 1 and not group.own and now_s - group.since_s > LATE * typical_s
    ]
    late.sort(key=lambda group: (group.since_s, group.group_no))
    return [group.group_no for group in late[: max(0, bound - sum(group.nodes > 1 for group in groups))]]


def late_groups(
    connection: sa.Connection, node: NodeId, *, size: int, bound: int, plays: bool = False, now_ms: int
) -> list[int]:
    """Return the late groups of a batch of `size` groups that the node may be given beside another.

    In a round of episodes (`plays`), the learner does not have a group whose turn waits for its environment.
    """
    newest = connection.execute(sa.select(batches.c.reported_ms).order_by(batches.c.batch.desc()).limit(1)).first()
    has = (RolloutState.BUFFERED,) if plays else WAITING
    buffered = sa.select(sa.func.count()).where(rollouts.c.state.in_(has), is_for_training(rollouts.c.group_no))
    missing = size - connection.execute(buffered).scalar_one()
    typical_ms, helper_ms = _answer_ms(connection, None), _answer_ms(connection, node)
    if (newest is not None and newest.reported_ms is None) or typical_ms is None or helper_ms is None:
        return []
    out = (
        sa.select(
            leases.c.group_no,
            sa.func.min(leases.c.issued_ms),
            sa.func.count(),
            sa.func.max(sa.case((leases.c.node_id == node, 1), else_=0)),
        )
        .join(groups, groups.c.group_no == leases.c.group_no)
        .where(
            IS_OPEN, ~leases.c.surplus, is_for_training(leases.c.group_no), groups.c.state == GroupState.LEASED.value
        )
        .group_by(leases.c.group_no)
    )
    return choose(
        (
            GroupAtWork(number, since_ms / 1000, nodes, bool(own))
            for number, since_ms, nodes, own in connection.execute(out)
        ),
        missing=missing,
        bound=bound,
        typical_s=typical_ms / 1000,
        helper_s=helper_ms / 1000,
        now_s=now_ms / 1000,
    )


def _answer_ms(connection: sa.Connection, node: NodeId | None) -> float | None:
    """Return how long the last accepted answers took on average, of one node or of all."""
    which = (
        leases.c.ended_ms.is_not(None) & (leases.c.state == LeaseState.ACCEPTED) & is_for_training(leases.c.group_no)
    )
    if node is not None:
        which &= leases.c.node_id == node
    took = sa.select((leases.c.ended_ms - leases.c.issued_ms).label("ms")).where(which)
    lately = took.order_by(leases.c.ended_ms.desc()).limit(MEASURED_MAX).subquery()
    return connection.execute(sa.select(sa.func.avg(lately.c.ms))).scalar()
