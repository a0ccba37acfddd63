"""The tally: counts that every lease depends on, in one row: groups under way, and money reserved for open leases.

- They change in the effect that changes the groups and leases, so they are undone with it, and the same for every
  process.
- Code that changes a group's state, or opens or ends a lease, calls `change` right after: if the row is missing, it is
  made by counting, and that count includes the change.
- The leader counts again when it starts: no error outlives a restart.
"""

from typing import NamedTuple

import sqlalchemy as sa

from coordinator.rules.lifecycle import UNFINISHED
from coordinator.store.tables import IS_OPEN, groups, is_for_training, leases, tally
from ledger.prepared import Prepared


class Tally(NamedTuple):
    """The counts."""

    unfinished: int
    """Groups of the learner's that are under way, or accepted and not yet trained on."""
    reserved_micros: int
    """The most that the open leases may cost."""


# Built once: making a statement costs more than running it, and these run for every lease.
_read = Prepared(sa.select(tally.c.unfinished, tally.c.reserved_micros), Tally)
_change = Prepared(
    sa.update(tally).values(
        unfinished=tally.c.unfinished + sa.bindparam("groups"),
        reserved_micros=tally.c.reserved_micros + sa.bindparam("micros"),
    )
)
_begin = Prepared(sa.insert(tally))


def read(connection: sa.Connection) -> Tally:
    """Return the counts."""
    return _read(connection).first() or recount(connection)


def change(connection: sa.Connection, *, groups: int = 0, micros: int = 0) -> None:
    """Add `groups` to the unfinished groups and `micros` to the reserved money; both may be negative."""
    if (groups or micros) and not _change(connection, groups=groups, micros=micros).rowcount:
        recount(connection)


def counted(connection: sa.Connection) -> Tally:
    """Return the counts, from the groups and leases themselves."""
    unfinished = groups.c.state.in_(UNFINISHED) & is_for_training(groups.c.group_no)
    under_way = sa.select(sa.func.count()).select_from(groups).where(unfinished)
    reserved = sa.select(sa.func.coalesce(sa.func.sum(leases.c.max_cost_micros), 0)).where(IS_OPEN)
    return Tally(*(int(connection.execute(query).scalar_one()) for query in (under_way, reserved)))


def recount(connection: sa.Connection) -> Tally:
    """Count again, and store the counts."""
    counts = counted(connection)
    connection.execute(sa.delete(tally))
    _begin(connection, id=0, **counts._asdict())
    return counts
