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
from typing import Any, NamedTuple

import sqlalchemy as sa

from coordinator.rules.lease_allowance import MEASURED_MAX
from coordinator.rules.lifecycle import WAITING, GroupState, RolloutState
from coordinator.store.tables import IS_OPEN, batches, groups, is_for_training, leases, rollouts
from ledger.prepared import Prepared
from protocol.ids import NodeId
from protocol.work.lease import LeaseState

LATE = 1.5
"""The factor on the time that groups lately took, after which a group is late."""


class LeasedGroup(NamedTuple):
    """A group at work, as it is stored."""

    group_no: int
    since_ms: int
    nodes: int
    own: int


# Built once: making a statement costs more than running it, and these run for every request of an idle node.
_last_batch = Prepared(sa.select(batches.c.reported_ms).order_by(batches.c.batch.desc()).limit(1))
_trains = is_for_training(rollouts.c.group_no)
_buffered = {
    plays: Prepared(sa.select(sa.func.count()).where(rollouts.c.state.in_([str(state) for state in has]), _trains))
    for plays, has in ((False, WAITING), (True, (RolloutState.BUFFERED,)))
}
_own = sa.case((leases.c.node_id == sa.bindparam("node"), 1), else_=0)
_at_work: list[Any] = [
    leases.c.group_no,
    sa.func.min(leases.c.issued_ms).label("since_ms"),
    sa.func.count().label("nodes"),
    sa.func.max(_own).label("own"),
]
_out = Prepared(
    sa.select(*_at_work)
    .join(groups, groups.c.group_no == leases.c.group_no)
    .where(IS_OPEN, ~leases.c.surplus, is_for_training(leases.c.group_no), groups.c.state == GroupState.LEASED.value)
    .group_by(leases.c.group_no),
    LeasedGroup,
)


def _mean_of_last(which: sa.ColumnElement[bool]) -> Prepared[tuple[Any]]:
    """Return the statement of how long the last accepted answers took on average."""
    accepted = leases.c.ended_ms.is_not(None) & (leases.c.state == LeaseState.ACCEPTED.value)
    took = sa.select((leases.c.ended_ms - leases.c.issued_ms).label("ms"))
    took = took.where(accepted & is_for_training(leases.c.group_no) & which)
    lately = took.order_by(leases.c.ended_ms.desc()).limit(MEASURED_MAX).subquery()
    return Prepared(sa.select(sa.func.avg(lately.c.ms)))


_typical = _mean_of_last(sa.true())
_of_node = _mean_of_last(leases.c.node_id == sa.bindparam("node"))


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
    newest = _last_batch(connection).first()
    missing = size - _buffered[plays](connection).scalar_one()
    if (newest is not None and newest[0] is None) or not 0 < missing <= bound:
        return []  # as for most idle nodes
    typical_ms, helper_ms = _typical(connection).scalar(), _of_node(connection, node=node).scalar()
    if typical_ms is None or helper_ms is None:
        return []
    return choose(
        (
            GroupAtWork(group.group_no, group.since_ms / 1000, group.nodes, bool(group.own))
            for group in _out(connection, node=node)
        ),
        missing=missing,
        bound=bound,
        typical_s=typical_ms / 1000,
        helper_s=helper_ms / 1000,
        now_s=now_ms / 1000,
    )
