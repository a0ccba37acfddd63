"""The part of the book that some entries read and change: read before `book` applies them, written after.

- Only the rows of an entry are read: its claim or effect, the accounts of that claim's node, and a payout's batch.
- A batch of payouts has no row of its own, which could differ: its terms are in its entry, and its moved amount is the
  sum of its claims.
- Every write names the value that it replaces, and counts its rows.
- All functions work inside the caller's transaction, under the append lock of `ledger.store`.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa

from ledger.accounts import BUDGET, OUTSIDE, Account, paid, payable, paying, pending
from ledger.book import BookBroken, BookedBatch, BookState, Claim, ClaimState
from ledger.entry import CLAIM_KINDS, PAYOUT_KINDS, Entry, PayoutBatch
from ledger.prepared import Prepared, RowT, say_each
from ledger.tables import balances_table, claims_table, entries_table
from protocol.ids import Digest, NodeId

NAMES_AT_ONCE = 500
"""Names in one query: every database accepts this many parameters."""


class ContentHash(NamedTuple):
    """An entry's effect, and the hash of its content."""

    effect: str
    content_hash: str


class ClaimRow(NamedTuple):
    """A claim as the store has it."""

    claim_id: str
    node_id: str
    state: str
    amount_micros: int
    tokens: int
    entry_hash: str


class BalanceRow(NamedTuple):
    """An account and its balance."""

    account: str
    micros: int


_STATES = {state.value: state for state in ClaimState}

# Built once: building a statement costs more than running it.
_names: sa.BindParameter[Any] = sa.bindparam("names", expanding=True)
_effects = Prepared(
    sa.select(entries_table.c.effect, entries_table.c.content_hash).where(entries_table.c.effect.in_(_names)),
    ContentHash,
)
_bodies = Prepared(sa.select(entries_table.c.body).where(entries_table.c.effect.in_(_names)))
_claims = Prepared(sa.select(claims_table).where(claims_table.c.claim_id.in_(_names)), ClaimRow)
_payouts = Prepared(
    sa.select(claims_table.c.amount_micros).where(claims_table.c.claim_id.like(sa.bindparam("names_like")))
)
_accounts = Prepared(sa.select(balances_table).where(balances_table.c.account.in_(_names)), BalanceRow)
_set_balance = Prepared(
    sa.update(balances_table)
    .where(balances_table.c.account == sa.bindparam("name"), balances_table.c.micros == sa.bindparam("was"))
    .values(micros=sa.bindparam("now"))
)
_set_state = Prepared(
    sa.update(claims_table)
    .where(claims_table.c.claim_id == sa.bindparam("claim"), claims_table.c.state == sa.bindparam("was"))
    .values(state=sa.bindparam("now"))
)


def read_for(conn: sa.Connection, entries: Sequence[Entry]) -> BookState:
    """Return the part of the book that `book.step` reads for these entries."""
    of: defaultdict[str, list[Any]] = defaultdict(list)
    for entry in entries:
        of[entry.kind].append(entry)
    kinds = of.keys() & CLAIM_KINDS
    effects = [entry.effect for kind in of.keys() - kinds for entry in of[kind]]
    effects += [entry.commitment.effect for entry in of["reveal"]]
    effects += [entry.appealed for entry in of["ruling"]]
    effects += {entry.ruling.effect for entry in of["reinstate"]}
    once = {effect: Digest(digest) for effect, digest in _rows(conn, _effects, effects)}
    claims = {
        claim_id: Claim(NodeId(node), _STATES[state], amount_micros, tokens, Digest(entry_hash))
        for claim_id, node, state, amount_micros, tokens, entry_hash in _rows(
            conn, _claims, {entry.claim_id for kind in kinds for entry in of[kind]}
        )
    }
    nodes = {entry.node_id for kind in ("pending", "payout") for entry in of[kind]}
    nodes.update(claim.node_id for claim in claims.values())
    payouts = [entry for kind in PAYOUT_KINDS for entry in of[kind]]
    batches = dict(_read_batches(conn, {entry.batch_effect for entry in payouts})) if payouts else {}
    held_in = (pending, payable, paying, paid) if payouts else (pending, payable)
    accounts = {OUTSIDE, BUDGET, *(account_of(node) for node in nodes for account_of in held_in)}
    return BookState(balances_of(conn, accounts), claims, once, batches)


def balances_of(conn: sa.Connection, accounts: Iterable[Account]) -> dict[Account, int]:
    """Return the balances of those of the accounts that have a row."""
    by_name = {str(account): account for account in accounts}
    return {by_name[name]: micros for name, micros in _rows(conn, _accounts, by_name)}


def write(conn: sa.Connection, before: BookState, after: BookState) -> None:
    """Write the balances and claims that have changed since they were read."""
    made: list[tuple[Any, ...]] = []
    moved = []
    for account, micros in after.balances.items():
        had = before.balances.get(account)
        if had is None:
            made.append((str(account), micros))
        elif had != micros:
            moved.append({"name": str(account), "was": had, "now": micros})
    insert(conn, balances_table, made)
    replace(conn, _set_balance, moved)
    begun: list[tuple[Any, ...]] = []
    settled = []
    for claim_id, claim in after.claims.items():
        was = before.claims.get(claim_id)
        if was is None:
            state = claim.state.value
            begun.append((claim_id, claim.node_id, state, claim.amount_micros, claim.tokens, claim.entry_hash))
        elif was.state is not claim.state:
            settled.append({"claim": claim_id, "was": was.state.value, "now": claim.state.value})
    insert(conn, claims_table, begun)
    replace(conn, _set_state, settled)


def insert(conn: sa.Connection, table: sa.Table, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert rows, given as tuples in the order of the table's columns.

    They bypass SQLAlchemy's handling of parameters, which takes longer than SQLite itself. So a column must have a type
    that the driver accepts without conversion: all of the ledger's do.
    """
    if rows:
        say_each(conn, _insertion(table, conn.dialect), rows)


def replace(conn: sa.Connection, statement: Prepared[Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Compare and set: each row must still have the value that was read."""
    if statement.each(conn, rows) != len(rows):
        raise BookBroken("A ledger row changed under the append lock: something else writes to the ledger's tables.")


@cache
def _insertion(table: sa.Table, dialect: sa.Dialect) -> str:
    """Return the driver's own text to insert a row into a table."""
    names = ", ".join(dialect.identifier_preparer.quote(column.name) for column in table.columns)
    mark = "?" if dialect.paramstyle == "qmark" else "%s"
    return f"INSERT INTO {table.name} ({names}) VALUES ({', '.join(mark for _ in table.columns)})"


def _read_batches(conn: sa.Connection, effects: Collection[str]) -> Iterator[tuple[int, BookedBatch]]:
    """Yield the published batches of these effects, with the sums of their payouts."""
    for (body,) in _rows(conn, _bodies, effects):
        head = PayoutBatch.from_bytes(bytes(body))
        moved = _payouts(conn, names_like=f"{head.batch}:%").scalars()
        yield head.batch, BookedBatch(head.payees, head.amount_micros, len(moved), sum(moved))


def _rows(conn: sa.Connection, statement: Prepared[RowT], names: Collection[str]) -> Iterator[RowT]:
    """Yield the rows of many names, `NAMES_AT_ONCE` names per query."""
    waiting = list(names)
    for start in range(0, len(waiting), NAMES_AT_ONCE):
        yield from statement(conn, names=waiting[start : start + NAMES_AT_ONCE])
