"""Earnings of nodes in the last hour and the last day, and what owners were paid: `/v1/owners/…/rates`, node pages.

- Credit counts when it is accepted; what is voided later counts against the hour in which it was voided.
- It is a fold over the newest day of the ledger, kept in memory in buckets of five minutes and continued where it
  stopped. Entries of the future do not count. The day is read again when their time comes or the clock is set back.
- Times are those of the ledger's entries: the clock of the coordinator, not of the nodes.
"""

from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sqlalchemy as sa

from coordinator.config import Config
from coordinator.store.tables import nodes, payees, payout_batches
from coordinator.transactions.payouts import BatchState
from ledger import store
from ledger.tables import claims_table, entries_table
from protocol.text.money import EarningPace

BUCKET_MS = 300_000
HOUR_BUCKETS = 12
DAY_BUCKETS = 24 * HOUR_BUCKETS
HOUR_MS = HOUR_BUCKETS * BUCKET_MS

_KINDS = {"pending": 1, "void": -1, "reinstate": 1}
_PREFIX = {"pending": "pending:", "void": "settle:", "reinstate": "reinstate:"}


class EarningRates:
    """Net credit of each node by time; `read` adds new entries."""

    def __init__(self) -> None:
        self._of_node: defaultdict[str, array[int]] = defaultdict(_empty_ring)
        self._first_ms: dict[str, int] = {}
        """Time of the first entry read for a node; more exact than its bucket."""
        self._newest = 0
        self._entries: int | None = None
        self._ahead: int | None = None
        """The earliest bucket of the entries that were left out because their time had not come."""

    def read(self, connection: sa.Connection, now_ms: int) -> None:
        """Read the entries since the last call; all of the last day at first, or after the clock was set back."""
        now = now_ms // BUCKET_MS
        came_true = self._ahead is not None and now >= self._ahead
        if self._entries is None or now < self._newest or came_true:
            self._of_node.clear()
            self._first_ms.clear()
            self._newest = now
            since_ms = (now - DAY_BUCKETS) * BUCKET_MS
            first = sa.select(sa.func.min(entries_table.c.index)).where(entries_table.c.recorded_ms >= since_ms)
            self._entries, self._ahead = connection.execute(first).scalar() or 0, None
        self._move_to(now)
        end = store.size(connection)
        for recorded_ms, kind, node_id, micros in connection.execute(_entries(self._entries, end)):
            bucket = recorded_ms // BUCKET_MS
            if now - DAY_BUCKETS < bucket <= now:
                self._of_node[node_id][bucket % DAY_BUCKETS] += _KINDS[kind] * micros
                self._first_ms.setdefault(node_id, recorded_ms)
            elif bucket > now:
                self._ahead = min(bucket, self._ahead or bucket)
        self._entries = end

    def pace(self, node_id: str, now_ms: int) -> EarningPace:
        """Return a node's pace by the entries read so far."""
        buckets = self._of_node.get(node_id)
        if buckets is None:
            return EarningPace()
        now = min(now_ms // BUCKET_MS, self._newest)
        numbers = range(now - DAY_BUCKETS + 1, now + 1)
        first = next((number for number in numbers if buckets[number % DAY_BUCKETS]), None)
        if first is None:
            return EarningPace()
        # The hour is the running bucket and the eleven before it, scaled to a whole hour.
        hour = sum(buckets[number % DAY_BUCKETS] for number in range(max(first, now - HOUR_BUCKETS + 1), now + 1))
        covered_ms = max(1, now_ms - max(first, now - HOUR_BUCKETS + 1) * BUCKET_MS)
        whole = first <= now - HOUR_BUCKETS
        began_ms = max(first * BUCKET_MS, self._first_ms[node_id])
        earning_s = max(0, now_ms - began_ms) / 1000
        return EarningPace(
            round(hour * HOUR_MS / covered_ms) if whole else hour,
            sum(buckets),
            min(earning_s, DAY_BUCKETS * BUCKET_MS / 1000),
        )

    def _move_to(self, bucket: int) -> None:
        """Empty the buckets of the ring that now stand for later times."""
        for number in range(max(self._newest + 1, bucket - DAY_BUCKETS + 1), bucket + 1):
            for buckets in self._of_node.values():
                buckets[number % DAY_BUCKETS] = 0
        self._newest = bucket
        for node_id in [node_id for node_id, buckets in self._of_node.items() if not any(buckets)]:
            del self._of_node[node_id], self._first_ms[node_id]


def _empty_ring() -> "array[int]":
    return array("q", bytes(8 * DAY_BUCKETS))


def _entries(start: int, end: int) -> sa.Select[Any]:
    """Select the entries that move a node's credit, with the node and the amount of their claim."""
    entry = entries_table.c
    begins = sa.case({kind: len(prefix) + 1 for kind, prefix in _PREFIX.items()}, value=entry.kind)
    return (
        sa.select(entry.recorded_ms, entry.kind, claims_table.c.node_id, claims_table.c.amount_micros)
        .join(claims_table, claims_table.c.claim_id == sa.func.substr(entry.effect, begins))
        .where(entry.index >= start, entry.index < end, entry.kind.in_(_KINDS))
        .order_by(entry.index)
    )


class OwnerPayouts(NamedTuple):
    """Totals of an owner in all batches."""

    paid_micros: int = 0
    under_way_micros: int = 0
    """The owner's part of batches that are made and not settled."""
    payouts: int = 0
    last_ms: int | None = None
    """Time at which the last settled batch was made."""


class RoundPayouts(NamedTuple):
    """Totals of a round's batches, and the terms of the next one."""

    paid_micros: int
    batches: int
    """Settled batches."""
    last_ms: int | None
    """Time at which the last batch was made, settled or not."""
    next_ms: int | None
    """Time at which the next batch is due; None without a schedule."""
    minimum_micros: int


@dataclass(frozen=True)
class RateFigures:
    """The pace of every node, and the payouts of every owner, at one moment."""

    now_ms: int
    paces: Mapping[str, EarningPace]
    nodes: Mapping[str, Sequence[str]]
    """The nodes of each owner."""
    paid: Mapping[str, OwnerPayouts]
    payouts: RoundPayouts

    def pace(self, node_id: str) -> EarningPace:
        return self.paces.get(node_id, EarningPace())

    def to_json(self, owner: str) -> dict[str, Any]:
        """Return the figures of an owner; all amounts are micro-units."""
        mine = {node_id: self.pace(node_id) for node_id in self.nodes.get(owner, ())}
        return {
            "as_of_ms": self.now_ms,
            "owner": owner,
            "nodes": [{"node_id": node_id, **pace._asdict()} for node_id, pace in mine.items()],
            "total": sum(mine.values(), EarningPace())._asdict(),
            "paid": self.paid.get(owner, OwnerPayouts())._asdict(),
            "payouts": self.payouts._asdict(),
        }


def figures(connection: sa.Connection, rates: EarningRates, config: Config, now_ms: int) -> RateFigures:
    """Return the figures of all nodes and owners."""
    rates.read(connection, now_ms)
    owned: defaultdict[str, list[str]] = defaultdict(list)
    for node_id, owner in connection.execute(sa.select(nodes.c.node_id, nodes.c.owner).order_by(nodes.c.node_id)):
        owned[owner].append(node_id)
    paces = {node_id: rates.pace(node_id, now_ms) for members in owned.values() for node_id in members}
    return RateFigures(now_ms, paces, owned, _paid(connection), round_payouts(connection, config))


def round_payouts(connection: sa.Connection, config: Config) -> RoundPayouts:
    """Return what the round has paid, and when its next batch is due."""
    batch = payout_batches.c
    settled = batch.state == BatchState.SETTLED.value
    total = sa.select(sa.func.coalesce(sa.func.sum(payees.c.amount_micros), 0), sa.func.count(batch.batch.distinct()))
    paid, count = connection.execute(
        total.join_from(payees, payout_batches, batch.batch == payees.c.batch).where(settled)
    ).one()
    last_ms = connection.execute(sa.select(sa.func.max(batch.made_ms))).scalar()
    every_ms = int(config.payouts.every_d * 86_400_000)
    began_ms = connection.execute(sa.select(entries_table.c.recorded_ms).where(entries_table.c.index == 0)).scalar()
    since_ms = began_ms if last_ms is None else last_ms
    next_ms = since_ms + every_ms if every_ms and since_ms is not None else None
    return RoundPayouts(int(paid), count, last_ms, next_ms, config.payouts.minimum_micros)


def _paid(connection: sa.Connection) -> dict[str, OwnerPayouts]:
    batch, settled = payout_batches.c, BatchState.SETTLED.value
    amount = payees.c.amount_micros
    rows = connection.execute(
        sa.select(
            payees.c.owner,
            sa.func.sum(sa.case((batch.state == settled, amount), else_=0)),
            sa.func.sum(sa.case((batch.state == settled, 0), else_=amount)),
            sa.func.sum(sa.case((batch.state == settled, 1), else_=0)),
            sa.func.max(sa.case((batch.state == settled, batch.made_ms))),
        )
        .join_from(payees, payout_batches, batch.batch == payees.c.batch)
        .group_by(payees.c.owner)
    )
    return {owner: OwnerPayouts(int(paid), int(way), int(count), last) for owner, paid, way, count, last in rows}
