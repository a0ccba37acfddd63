"""Trials: leases that newcomers get from a small common budget while others ask, as effects; since keys are free.

- A newcomer is a node whose owner has no group yet that was found right. After a hard fault, an owner's nodes are
  newcomers again.
- A node that has finished none of its leases is a newcomer, too, if its owner has as many open leases as groups that
  were found right.
- In a round that begins, all nodes are newcomers, and may fill the whole window. If it is full, and leases are open for
  longer than half of their time, trials are given beyond it: hoarders may have come first.
- While others ask, a newcomer's lease is a *trial*: nothing waits for its group, which counts as under way only once it
  is answered. Others may use its place at once, and in an evaluation the group itself.
- An answer to a trial enters the buffer if there is place for it, else it is paid as surplus, and its prompt is offered
  again. Either way it proves its owner once an audit found it right.
- If more newcomers ask than may begin, the one that registered first is next: a newcomer that stays gets its turn,
  however many keys come after it.
- All newcomers together begin `SHARE` of a full window of trials within a lease's time, those of one network group a
  quarter of these: this limits what is paid for groups that nobody trains on. Each newcomer has one lease at a time,
  and waits twice as long after each lease that expires.
"""

from collections.abc import Mapping
from math import ceil
from typing import NamedTuple

import sqlalchemy as sa

from coordinator.rules import lease_allowance
from coordinator.store.facts import Fact, get_fact, set_fact
from coordinator.store.tables import IS_OPEN, leases, nodes
from coordinator.transactions.leases import LeaseTerms, last_expired_ms
from coordinator.transactions.registry import WorkerRow
from ledger.prepared import Prepared
from protocol.ids import NodeId

SHARE = 0.25
"""The trials that may begin within a lease's time, as a share of a full window."""

NEIGHBOURHOODS = 4
"""The network groups that can use up the budget: each has this fraction of it."""

OTHERS = Fact[int | None]("others_asked_ms", None)
"""The fact of when a node that is no newcomer last asked; updated after a lease's time, and valid for two."""

TRIALS = Fact[Mapping[str, float]]("trials_until_ms", {})
"""The fact of the budget: for each network group, and for all together, until when the given trials count."""

ALL = "all"

LINE = Fact[Mapping[str, list[int]]]("trials_line", {})
"""The fact of the newcomers that wait for a trial: when each registered and when it last asked."""

LINE_MAX = 32
"""Newcomers that are stored: the oldest. A younger one asks again, and is in line after these."""

IN_LINE_MS = 5_000
"""The time that a newcomer is in line since it last asked: a little longer than two answers are held back."""


class NewcomerBudget(NamedTuple):
    """The stored budget, and the newcomers that wait for it."""

    given: Mapping[str, float]
    line: Mapping[str, list[int]]


class NewcomerLeases(NamedTuple):
    """The leases that a newcomer may hold, and whether it holds one."""

    lease_allowance: int | None
    holds: bool


# Built once: making a statement costs more than running it, and these run for every lease.
_this = nodes.c.node_id == sa.bindparam("node")
_holds = sa.exists().where(IS_OPEN, leases.c.node_id == nodes.c.node_id).label("holds")
_old = Prepared(
    sa.select(leases.c.lease_id)
    .where(IS_OPEN, leases.c.expires_ms <= sa.bindparam("at_latest", type_=sa.BigInteger))
    .limit(1)
)
# No more are counted than are asked for.
_out = Prepared(
    sa.select(sa.func.count()).select_from(
        sa.select(leases.c.lease_id)
        .join(nodes, nodes.c.node_id == leases.c.node_id)
        .where(IS_OPEN, nodes.c.owner == sa.bindparam("owner"))
        .limit(sa.bindparam("enough", type_=sa.Integer))
        .subquery()
    )
)
_own = Prepared(sa.select(nodes.c.lease_allowance, _holds).where(_this), NewcomerLeases)


def do_others_ask(
    connection: sa.Connection, worker: WorkerRow, others_ms: int | None, terms: LeaseTerms, now_ms: int
) -> bool:
    """Return True if nodes that are no newcomers, maybe this one, ask for work. `others_ms` is the fact `OTHERS`."""
    if worker.validated_groups:
        if others_ms is None or others_ms <= now_ms - terms.timeout_ms:
            set_fact(connection, OTHERS, now_ms)
        return True
    return is_fresh(others_ms, terms, now_ms)


def is_newcomer(connection: sa.Connection, worker: WorkerRow, terms: LeaseTerms) -> bool:
    """Return True if trials are all that this node gets while others ask.

    An owner has at most one other open lease per group that was found right, at nodes that have finished none: else one
    good group would admit any number of nodes.
    """
    if not worker.validated_groups:
        return True
    if worker.lease_allowance is not None and worker.lease_allowance >= _at_first(terms):
        return False
    out = _out(connection, owner=worker.owner, enough=worker.validated_groups).scalar_one()
    return bool(out >= worker.validated_groups)


def is_fresh(others_ms: int | None, terms: LeaseTerms, now_ms: int) -> bool:
    """Return True if the fact `OTHERS` still holds."""
    return others_ms is not None and others_ms > now_ms - 2 * terms.timeout_ms


def is_hoarded(connection: sa.Connection, terms: LeaseTerms, now_ms: int) -> bool:
    """Return True if any lease is open for longer than half of its time."""
    return _old(connection, at_latest=now_ms + terms.timeout_ms // 2).first() is not None


def may_begin(
    connection: sa.Connection, worker: WorkerRow, budget: NewcomerBudget, place: str, terms: LeaseTerms, now_ms: int
) -> int:
    """Return 1 if a newcomer from network group `place` may begin a trial; else put it in line and return 0."""
    if _must_wait(connection, NodeId(worker.node_id), terms, now_ms):
        return 0
    if place and not _left(budget.given, place, terms, now_ms):
        return 0
    line = {node: times for node, times in budget.line.items() if times[1] > now_ms - IN_LINE_MS}
    own = line.pop(worker.node_id, None)
    before = sum(since_ms < worker.registered_ms for since_ms, _ in line.values())
    if before < _left(budget.given, ALL, terms, now_ms):
        if own is not None:
            set_fact(connection, LINE, line)
        return 1
    if before < LINE_MAX:
        line[worker.node_id] = [worker.registered_ms, now_ms]
        set_fact(connection, LINE, dict(sorted(line.items(), key=lambda waiting: waiting[1])[:LINE_MAX]))
    return 0


def record_begun(connection: sa.Connection, place: str, terms: LeaseTerms, now_ms: int) -> None:
    """Charge the budget with a trial that was given to network group `place`."""
    begun = get_fact(connection, TRIALS)
    given = dict(begun)
    for name in {ALL, place or ALL}:
        given[name] = max(given.get(name, 0.0), now_ms) + _each_ms(name, terms)
    set_fact(connection, TRIALS, {name: until_ms for name, until_ms in given.items() if until_ms > now_ms})


def _left(given: Mapping[str, float], name: str, terms: LeaseTerms, now_ms: int) -> int:
    """Return how many more trials a budget has.

    Each counts for its part of a lease's time, one after the other, and all of them end within a lease's time from now.
    """
    counted_ms = max(0.0, given.get(name, 0.0) - now_ms)
    return int((terms.timeout_ms - counted_ms + 1) / _each_ms(name, terms))


def _each_ms(name: str, terms: LeaseTerms) -> float:
    """Return how long a trial counts, in milliseconds; in its network group it counts longer than among all."""
    most = ceil(SHARE * terms.window_max)
    return terms.timeout_ms / (most if name == ALL else max(1, most // NEIGHBOURHOODS))


def _must_wait(connection: sa.Connection, node: NodeId, terms: LeaseTerms, now_ms: int) -> bool:
    """Return True if a newcomer holds a lease, or must wait since its leases expired."""
    own = _own(connection, node=node).single_row()
    misses = 0 if own.lease_allowance is None else _at_first(terms) - own.lease_allowance
    wait_ms = lease_allowance.wait_ms(misses, timeout_ms=terms.timeout_ms)
    return bool(own.holds) or (wait_ms > 0 and last_expired_ms(connection, node) > now_ms - wait_ms)


def _at_first(terms: LeaseTerms) -> int:
    """Return how many leases a node may hold before any has ended."""
    return min(terms.held_max, terms.newcomer_leases)
