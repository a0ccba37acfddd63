"""Trials: the leases that newcomers get while others ask, out of a small common budget, as effects. Keys are free.

- A newcomer is a node whose owner has no group yet that was found right. After a hard fault an owner is one again.
- In a round that begins, everybody is a newcomer, and they have all the room there is.
- While others ask, a newcomer's lease is a *trial*: nothing waits for its group, which counts as under way only once it
  is answered. Others get the room of it at once, and in an evaluation the group itself.
- An answer to a trial enters the buffer if there is room for it, else it is paid as one that came second, and its
  prompt is offered again. Either way it proves its owner once an audit found it right.
- All newcomers together begin `SHARE` of a full window of trials within a lease's time, those of one neighbourhood a
  quarter of these: so much, at most, is paid for what nobody trains on. Each of them has one lease at a time, and waits
  twice as long after each that expires.
"""

from collections.abc import Mapping
from math import ceil
from typing import Any

import sqlalchemy as sa

from coordinator.store.state import get_fact, set_fact
from coordinator.store.tables import IS_OPEN, leases, nodes
from coordinator.work import sizing
from coordinator.work.leases import Terms, last_expired_ms
from ledger.prepared import Prepared
from protocol.ids import NodeId

SHARE = 0.25
"""Of a full window, in a lease's time."""

NEIGHBOURHOODS = 4
"""Of which each may have a whole share of the budget."""

OTHERS = "others_asked_ms"
"""The fact of when somebody who is no newcomer last asked; noted anew after a lease's time, and good for two."""

TRIALS = "trials_until_ms"
"""The fact of the budget: for each neighbourhood, and for all together, until when what was given of it counts."""

ALL = "all"

# Built once: making a statement costs more than running it, and these run for every lease.
_this = nodes.c.node_id == sa.bindparam("node")
_holds = sa.exists().where(IS_OPEN, leases.c.node_id == nodes.c.node_id).label("holds")
_own = Prepared(sa.select(nodes.c.lease_allowance, _holds).where(_this))


def is_on_trial(connection: sa.Connection, worker: Any, others_ms: int | None, terms: Terms, now_ms: int) -> bool:
    """Return True if what this node gets now are trials. `others_ms` is the fact `OTHERS`, if there is one."""
    if worker.is_known:
        if others_ms is None or others_ms <= now_ms - terms.timeout_ms:
            set_fact(connection, OTHERS, now_ms)
        return False
    return do_others_ask(others_ms, terms, now_ms)


def do_others_ask(others_ms: int | None, terms: Terms, now_ms: int) -> bool:
    """Return True if nodes that are no newcomers ask for work, by the fact `OTHERS`."""
    return others_ms is not None and others_ms > now_ms - 2 * terms.timeout_ms


def may_begin(
    connection: sa.Connection, node: NodeId, given: Mapping[str, float] | None, place: str, terms: Terms, now_ms: int
) -> int:
    """Return 1 if a newcomer from this neighbourhood may begin a trial, else 0. `given` is the fact `TRIALS`."""
    if None in (_until(given or {}, name, terms, now_ms) for name in _names(place)):
        return 0
    return int(not _must_wait(connection, node, terms, now_ms))


def record_begun(connection: sa.Connection, place: str, terms: Terms, now_ms: int) -> None:
    """Charge the budget with a trial that was given to this neighbourhood."""
    given: dict[str, float] = get_fact(connection, TRIALS, {})
    after = {name: _until(given, name, terms, now_ms) or given[name] for name in _names(place)}
    set_fact(connection, TRIALS, {name: until for name, until in (given | after).items() if until > now_ms})


def _names(place: str) -> tuple[str, ...]:
    """The budgets of a neighbourhood; one without a name stands for many, and has no share of its own to pass."""
    return (ALL, place) if place else (ALL,)


def _until(given: Mapping[str, float], name: str, terms: Terms, now_ms: int) -> float | None:
    """Until when a budget counts what was given of it, with one trial more; None if that is more than it has.

    Each trial counts for its part of a lease's time, and they count one after the other.
    """
    most = ceil(SHARE * terms.window_max)
    if name != ALL:
        most = max(1, most // NEIGHBOURHOODS)
    until = max(given.get(name, 0.0), now_ms) + terms.timeout_ms / most
    return until if until < now_ms + terms.timeout_ms + 1 else None


def _must_wait(connection: sa.Connection, node: NodeId, terms: Terms, now_ms: int) -> bool:
    """Return True if a newcomer holds a lease, or must wait for what it let expire."""
    own = _own(connection, node=node).one()
    at_first = min(terms.held_max, terms.newcomer_leases)
    misses = 0 if own.lease_allowance is None else at_first - own.lease_allowance
    wait_ms = sizing.wait_ms(misses, timeout_ms=terms.timeout_ms)
    return bool(own.holds) or (wait_ms > 0 and last_expired_ms(connection, node) > now_ms - wait_ms)
