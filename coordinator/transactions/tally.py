"""Counts that decide over every lease, kept in one row: groups under way, and money reserved for open leases.

- They are part of the effect that changes what they count, so they are undone with it, and the same for every process.
- Whoever changes a group's state or opens or ends a lease says it here right after: a round's row is made by counting
  when it is first missed, and that finds the change done.
- The leader counts anew when it starts: nothing that went wrong outlives a restart.
"""

from typing import NamedTuple

import sqlalchemy as sa

from coordinator.rules.lifecycle import UNFINISHED
from coordinator.store.tables import IS_OPEN, groups, leases, tally
from ledger.prepared import Prepared


class Tally(NamedTuple):
    """What is counted."""

    unfinished: int
    """Groups of the learner's that are under way, or accepted and not yet trained on."""
    reserved_micros: int
    """What the open leases may cost at their dearest."""


# Built once: making a statement costs more than running it, and these run for every lease.
_read = Prepared(sa.select(tally.c.unfinished, tally.c.reserved_micros))
_change = Prepared(
    sa.update(tally).values(
        unfinished=tally.c.unfinished + sa.bindparam("groups"),
        reserved_micros=tally.c.reserved_micros + sa.bindparam("micros"),
    )
)
_begin = Prepared(sa.insert(tally))


def read(connection: sa.Connection) -> Tally:
    """How it stands."""
    row = _read(connection).first()
    return Tally(*row) if row else recount(connection)


def change(connection: sa.Connection, *, groups: int = 0, micros: int = 0) -> None:
    """So many groups more, or less, are unfinished now, and so much more is reserved."""
    if (groups or micros) and not _change(connection, groups=groups, micros=micros).rowcount:
        recount(connection)


def counted(connection: sa.Connection) -> Tally:
    """The same from the groups and leases themselves."""
    unfinished = groups.c.state.in_(UNFINISHED) & (groups.c.group_no >= 0)
    under_way = sa.select(sa.func.count()).select_from(groups).where(unfinished)
    reserved = sa.select(sa.func.coalesce(sa.func.sum(leases.c.max_cost_micros), 0)).where(IS_OPEN)
    return Tally(*(int(connection.execute(query).scalar_one()) for query in (under_way, reserved)))


def recount(connection: sa.Connection) -> Tally:
    """Count anew, and keep that."""
    found = counted(connection)
    connection.execute(sa.delete(tally))
    _begin(connection, id=0, **found._asdict())
    return found
