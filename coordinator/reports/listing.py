"""The part of the round's listing that its ledger proves: totals and payments under the newest checkpoint.

- Totals are those of the entries that the checkpoint covers: what was booked since is taken off the balances again.
- The times of payments are those at which the coordinator recorded them.
- A settled batch never changes, so its payment is read once and kept in memory.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import sqlalchemy as sa

from coordinator.store.tables import is_alive, nodes
from ledger import store
from ledger.accounts import AccountKind
from ledger.book import ClaimState
from ledger.entry import Deposit, Entry, Paid, Post, Reinstate
from ledger.listing import PAYMENTS_MAX, ListedPayment, ListedPrices, ListedTotals
from ledger.tables import balances_table, checkpoint_table, claims_table, entries_table
from protocol.errors import NotFound

PAGE_ENTRIES = 1_000
"""Entries or effects that one statement reads."""


class BatchPayment(NamedTuple):
    """The entries of a settled batch: the size of the log after them, their time, and their amount."""

    size: int
    ms: int
    amount_micros: int


class ProvedFigures(NamedTuple):
    """The figures that the log under a checkpoint proves."""

    checkpoint: bytes
    totals: ListedTotals
    payments: tuple[ListedPayment, ...]


class PaymentHistory:
    """The payments of the round's settled batches; `read` adds new ones."""

    def __init__(self) -> None:
        self._batches: dict[int, BatchPayment] = {}

    def read(self, connection: sa.Connection) -> ProvedFigures:
        """Return the figures of the newest checkpoint; raise `NotFound` before the first."""
        row = connection.execute(sa.select(checkpoint_table.c.size, checkpoint_table.c.note)).one_or_none()
        if row is None:
            raise NotFound("No checkpoint is signed yet.", hint="Try again in a few seconds.")
        self._read_batches(connection)
        payments, paid = [], 0
        for batch in sorted(self._batches.values()):
            if batch.size <= row.size:
                paid += batch.amount_micros
                payments.append(ListedPayment(size=batch.size, ms=batch.ms, paid_micros=paid))
        return ProvedFigures(bytes(row.note), _totals(connection, row.size), tuple(payments[-PAYMENTS_MAX:]))

    def _read_batches(self, connection: sa.Connection) -> None:
        claim = claims_table.c
        paid = sa.select(claim.claim_id, claim.amount_micros).where(claim.state == ClaimState.PAID.value)
        new: defaultdict[int, dict[str, int]] = defaultdict(dict)
        for claim_id, micros in connection.execute(paid):
            if (number := int(claim_id.partition(":")[0])) not in self._batches:
                new[number][f"paid:{claim_id}"] = micros
        for number, shares in new.items():
            ends = [
                _last_of(connection, list(shares)[at : at + PAGE_ENTRIES]) for at in range(0, len(shares), PAGE_ENTRIES)
            ]
            self._batches[number] = BatchPayment(*max(ends), sum(shares.values()))


def _last_of(connection: sa.Connection, effects: Sequence[str]) -> tuple[int, int]:
    """Return the size of the log after the last of some entries, and the time of the last."""
    entry = entries_table.c
    found = sa.select(sa.func.max(entry.index), sa.func.max(entry.recorded_ms)).where(entry.effect.in_(effects))
    index, ms = connection.execute(found).one()
    return index + 1, ms


def _totals(connection: sa.Connection, size: int) -> ListedTotals:
    """Return the totals of the first `size` entries."""
    held = {
        kind: _total_held(connection, f"{kind}:")
        for kind in (AccountKind.PAYABLE, AccountKind.PAYING, AccountKind.PAID)
    }
    paid, owed = held[AccountKind.PAID], held[AccountKind.PAYABLE] + held[AccountKind.PAYING]
    for entry in _since(connection, size):
        if isinstance(entry, Post | Reinstate | Paid):
            claimed = sa.select(claims_table.c.amount_micros).where(claims_table.c.claim_id == entry.claim_id)
            micros: int = connection.execute(claimed).scalar_one()
            owed += micros if isinstance(entry, Paid) else -micros
            paid -= micros if isinstance(entry, Paid) else 0
    deposits = _deposits(connection, size)
    return ListedTotals(
        deposited_micros=sum(deposit.amount_micros for deposit in deposits),
        gifts_micros=sum(deposit.amount_micros for deposit in deposits if deposit.is_gift),
        owed_micros=owed,
        paid_micros=paid,
    )


def _total_held(connection: sa.Connection, prefix: str) -> int:
    account = balances_table.c
    total = sa.select(sa.func.coalesce(sa.func.sum(account.micros), 0)).where(account.account.startswith(prefix))
    return int(connection.execute(total).scalar_one())


def _since(connection: sa.Connection, size: int) -> list[Entry]:
    found: list[Entry] = []
    while page := store.entries(connection, size, PAGE_ENTRIES):
        found += [recorded.entry for recorded in page]
        size = page[-1].index + 1
    return found


def _deposits(connection: sa.Connection, size: int) -> list[Deposit]:
    """Return the deposits among the first `size` entries: the operator's, and gifts."""
    entry = entries_table.c
    bodies = sa.select(entry.body).where(entry.effect.startswith("deposit:"), entry.index < size)
    return [Deposit.from_bytes(body) for body in connection.execute(bodies).scalars()]


def asked_prices(connection: sa.Connection, *, alive_since_ms: int, maximum: int) -> ListedPrices:
    """Return the prices of the nodes that were heard of since a time, and the highest that the round pays."""
    price = nodes.c.price_micros_per_mtok
    span = sa.select(sa.func.min(price), sa.func.max(price)).where(is_alive(alive_since_ms))
    lowest, highest = connection.execute(span).one()
    return ListedPrices(lowest=lowest or 0, highest=highest or 0, maximum=maximum)
