"""The deletion of old queries, as effects.

- An ended query is deleted after `store.queries_d` days, once every claim for it is settled: no audit can change any
  more what its key was charged. The newest query stays, and keeps its number taken.
- Leases, claims, audits and the ledger stay: they prove what nodes were paid, and for which tokens.
- The usage of a key is counted at the key (`coordinator.transactions.api_keys`), so it never falls by a deletion.
"""

from collections.abc import Sequence

import sqlalchemy as sa

from coordinator.store.tables import IS_OPEN, QUERY_OPEN, audits, leases, queries
from protocol.errors import OutOfOrder

FORGOTTEN_AT_ONCE = 4000
"""Queries that one transaction deletes: nodes wait for it, but each step reads all answers."""


def find_old(connection: sa.Connection, ended_before_ms: int, most: int = FORGOTTEN_AT_ONCE) -> tuple[int, ...]:
    """Return the numbers of up to `most` queries that ended before a time and that no audit can change any more.

    It reads much, so it does not belong into a writer's transaction. The newest query stays: it keeps its number taken.
    """
    unsettled = sa.select(leases.c.group_no).join_from(audits, leases, leases.c.lease_id == audits.c.lease_id)
    at_work = sa.select(leases.c.group_no).where(IS_OPEN)
    old = (
        sa.select(queries.c.number)
        .where(~QUERY_OPEN, queries.c.ended_ms < ended_before_ms)
        .where(queries.c.number < sa.select(sa.func.max(queries.c.number)).scalar_subquery())
        .where(queries.c.group_no.not_in(unsettled.where(~audits.c.settled)), queries.c.group_no.not_in(at_work))
        .order_by(queries.c.number)
        .limit(most)
    )
    return tuple(connection.execute(old).scalars())


def forget(connection: sa.Connection, numbers: Sequence[int]) -> None:
    """Delete queries."""
    deleted = connection.execute(sa.delete(queries).where(queries.c.number.in_(numbers))).rowcount
    if deleted != len(numbers):
        raise OutOfOrder(f"{len(numbers) - deleted} of {len(numbers)} queries were deleted meanwhile.")
