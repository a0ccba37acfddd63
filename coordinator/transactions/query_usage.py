"""Usage of each API key, and the deletion of old queries, as effects.

- An ended query is deleted after `store.queries_d` days, once every claim for it is settled: no audit can change any
  more what its key was charged. The newest query stays, and keeps its number taken.
- Leases, claims, audits and the ledger stay: they prove what nodes were paid, and for which tokens.
- The usage by deleted queries is a fact, so the counts of a key never fall.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from coordinator.rules.lifecycle import RolloutState
from coordinator.store.facts import Fact, get_fact, set_fact
from coordinator.store.tables import IN_NO_BATCH, IS_OPEN, QUERY_OPEN, audits, leases, parts, queries, rollouts
from protocol.errors import OutOfOrder

FORGOTTEN = Fact[Mapping[str, list[int]]]("forgotten_queries", {})
"""The fact with the usage of each key by its deleted queries."""

FORGOTTEN_AT_ONCE = 4000
"""Queries that one transaction deletes: nodes wait for it, but each step reads all answers."""


@dataclass(frozen=True)
class KeyUsage:
    """The answers that a key got."""

    answered: int = 0
    tokens: int = 0
    """The sampled tokens of these answers that no audit has rejected."""

    def plus(self, other: "KeyUsage") -> "KeyUsage":
        """Return the sum."""
        return KeyUsage(self.answered + other.answered, self.tokens + other.tokens)


@dataclass(frozen=True)
class OldQueries:
    """Queries that may be deleted, and the usage that they were."""

    numbers: tuple[int, ...]
    usage: Mapping[int, KeyUsage]


def usage(connection: sa.Connection) -> dict[int, KeyUsage]:
    """Return the usage of each key, by its number; deleted queries are counted, too."""
    return _sum(_usage_of(connection, sa.true()), _forgotten(connection))


def usage_of_key(connection: sa.Connection, number: int) -> KeyUsage:
    """Return the usage of one key; deleted queries are counted, too."""
    stored = _usage_of(connection, queries.c.api_key == number)
    return stored.get(number, KeyUsage()).plus(_forgotten(connection).get(number, KeyUsage()))


def find_old(connection: sa.Connection, ended_before_ms: int, most: int = FORGOTTEN_AT_ONCE) -> OldQueries:
    """Return up to `most` queries that ended before a time and that no audit can change any more.

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
    numbers = tuple(connection.execute(old).scalars())
    return OldQueries(numbers, _usage_of(connection, queries.c.number.in_(numbers)) if numbers else {})


def forget(connection: sa.Connection, old: OldQueries) -> None:
    """Delete queries, and add what they were to the usage of their keys."""
    deleted = connection.execute(sa.delete(queries).where(queries.c.number.in_(old.numbers))).rowcount
    if deleted != len(old.numbers):
        raise OutOfOrder(f"{len(old.numbers) - deleted} of {len(old.numbers)} queries were deleted meanwhile.")
    kept = _sum(_forgotten(connection), old.usage)
    set_fact(connection, FORGOTTEN, {str(key): [used.answered, used.tokens] for key, used in kept.items()})


def _forgotten(connection: sa.Connection) -> dict[int, KeyUsage]:
    return {int(key): KeyUsage(*counts) for key, counts in get_fact(connection, FORGOTTEN).items()}


def _sum(one: Mapping[int, KeyUsage], other: Mapping[int, KeyUsage]) -> dict[int, KeyUsage]:
    none = KeyUsage()
    return {key: one.get(key, none).plus(other.get(key, none)) for key in one.keys() | other.keys()}


def _usage_of(connection: sa.Connection, which: sa.ColumnElement[bool]) -> dict[int, KeyUsage]:
    """Return the usage of each key by those queries that are stored."""
    counted = sa.select(queries.c.api_key, sa.func.count()).where(queries.c.state == "answered", which)
    answered = dict(map(tuple, connection.execute(counted.group_by(queries.c.api_key)).all()))
    of_parts = sa.select(sa.func.sum(parts.c.tokens)).where(parts.c.whole == rollouts.c.claim_id).scalar_subquery()
    sampled = (
        sa.select(queries.c.api_key, sa.func.sum(rollouts.c.tokens + sa.func.coalesce(of_parts, 0)))
        .join_from(queries, rollouts, rollouts.c.group_no == queries.c.group_no)
        .where(IN_NO_BATCH, rollouts.c.state == RolloutState.SERVED.value, which)
    )
    tokens = dict(map(tuple, connection.execute(sampled.group_by(queries.c.api_key)).all()))
    return {key: KeyUsage(count, int(tokens.get(key, 0))) for key, count in answered.items()}
