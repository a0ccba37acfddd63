"""The ledger's tables: entries are the truth, balances and claims are their running fold.

- Works on a connection the caller gives, inside the caller's transaction: nothing here begins or commits, so
  "rollout accepted" and "credit pending" can be one effect. An entry counts when that transaction has committed.
- `append` takes the head row first. It is the lock: appends of all processes follow each other, indexes have no
  gaps, and on SQLite the transaction is a writer before it reads. Keep such transactions short.
- `book.step` decides on the few rows it reads; every write then names the value it replaces and counts its rows.
- Constraints stand behind the code: one row per effect and per content hash, no account but `outside` below zero.
- Only portable SQL: SQLite (WAL and synchronous=FULL are the caller's to set), PostgreSQL (read committed or stricter).
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import sqlalchemy as sa

from ledger import book, fsck
from ledger.accounts import Account
from ledger.book import BookBroken, Claim, ClaimState, Outcome, State
from ledger.entry import Deposit, Entry, Pending, parse
from ledger.fsck import Difference, StoredEntry
from protocol import chunks
from protocol.ids import Digest, NodeId

PAGE_ENTRIES = 1_000
"""Entries that `rebuild` holds at a time."""

metadata = sa.MetaData()

_Index = sa.BigInteger().with_variant(sa.Integer, "sqlite")
"""On SQLite only an INTEGER primary key is the row id itself."""

head_table = sa.Table(
    "ledger_head",
    metadata,
    sa.Column("id", sa.Integer, sa.CheckConstraint("id = 0"), primary_key=True, autoincrement=False),
    sa.Column("size", sa.BigInteger, nullable=False),
)
entries_table = sa.Table(
    "ledger_entries",
    metadata,
    sa.Column("index", _Index, primary_key=True, autoincrement=False),
    sa.Column("content_hash", sa.String(64), nullable=False, unique=True),
    sa.Column("effect", sa.String(120), nullable=False, unique=True),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Column("recorded_ms", sa.BigInteger, nullable=False),
)
balances_table = sa.Table(
    "ledger_balances",
    metadata,
    sa.Column("account", sa.String(80), primary_key=True),
    sa.Column("micros", sa.BigInteger, nullable=False),
    sa.CheckConstraint("account = 'outside' OR micros >= 0", name="ledger_no_debt"),
)
claims_table = sa.Table(
    "ledger_claims",
    metadata,
    sa.Column("claim_id", sa.String(64), primary_key=True),
    sa.Column("node_id", sa.String(64), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("amount_micros", sa.BigInteger, nullable=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),
    sa.Column("entry_hash", sa.String(64), nullable=False),
)

# Built once: making a statement costs more than running it.
_move_head = sa.update(head_table).values(size=head_table.c.size + sa.bindparam("by")).returning(head_table.c.size)
_deposit = sa.select(entries_table.c.content_hash).where(entries_table.c.effect == sa.bindparam("effect"))
_claim = sa.select(claims_table).where(claims_table.c.claim_id == sa.bindparam("claim"))
_accounts = sa.select(balances_table).where(balances_table.c.account.in_(sa.bindparam("names", expanding=True)))
_set_balance = (
    sa.update(balances_table)
    .where(balances_table.c.account == sa.bindparam("name"), balances_table.c.micros == sa.bindparam("was"))
    .values(micros=sa.bindparam("now"))
)
_set_state = (
    sa.update(claims_table)
    .where(claims_table.c.claim_id == sa.bindparam("claim"), claims_table.c.state == sa.bindparam("was"))
    .values(state=sa.bindparam("now"))
)


@dataclass(frozen=True, slots=True)
class Recorded:
    """An entry as it stands in the log."""

    index: int
    entry: Entry
    content_hash: Digest
    recorded_ms: int


@dataclass(frozen=True, slots=True)
class NodeTotals:
    """What one node earned, by the state of its claims; the tokens are those of posted claims."""

    node_id: NodeId
    pending_micros: int
    posted_micros: int
    voided_micros: int
    posted_tokens: int


def create(conn: sa.Connection) -> None:
    """Make the tables and the empty log where they are missing."""
    metadata.create_all(conn)
    if conn.execute(sa.select(head_table.c.size)).first() is None:
        conn.execute(sa.insert(head_table).values(id=0, size=0))


def append(conn: sa.Connection, entry: Entry, now_ms: int) -> Outcome:
    """Apply an entry and record it, or say why it changes nothing."""
    index = _head(conn, 1) - 1
    before = _read_for(conn, entry)
    changed, outcome = book.step(before, entry)
    if outcome is not Outcome.APPLIED:
        _head(conn, -1)
        return outcome
    body = entry.to_bytes()
    conn.execute(
        sa.insert(entries_table),
        {
            "index": index,
            "content_hash": chunks.digest(body),
            "effect": entry.effect,
            "kind": entry.kind,
            "body": body,
            "recorded_ms": now_ms,
        },
    )
    _write_balances(conn, before, changed)
    _write_claims(conn, before, changed)
    return outcome


def balances(conn: sa.Connection) -> dict[Account, int]:
    """Every account that ever moved."""
    rows = conn.execute(sa.select(balances_table.c.account, balances_table.c.micros))
    return {Account.parse(account): micros for account, micros in rows}


def node_totals(conn: sa.Connection) -> list[NodeTotals]:
    """One row per node that ever had a claim, the best earner first."""
    columns = claims_table.c

    def total(column: sa.ColumnElement[int], state: ClaimState) -> sa.ColumnElement[int]:
        return sa.func.sum(sa.case((columns.state == state.value, column), else_=0))

    posted = total(columns.amount_micros, ClaimState.POSTED)
    rows = conn.execute(
        sa.select(
            columns.node_id,
            total(columns.amount_micros, ClaimState.PENDING),
            posted,
            total(columns.amount_micros, ClaimState.VOIDED),
            total(columns.tokens, ClaimState.POSTED),
        )
        .group_by(columns.node_id)
        .order_by(posted.desc(), columns.node_id)
    )
    # PostgreSQL sums 64-bit integers as decimals.
    return [NodeTotals(NodeId(node), *map(int, sums)) for node, *sums in rows]


def entries(conn: sa.Connection, start: int, limit: int) -> list[Recorded]:
    """Up to `limit` entries from index `start` on."""
    return [
        Recorded(row.index, parse(row.body), Digest(row.content_hash), row.recorded_ms)
        for row in _page(conn, start, limit)
    ]


def rebuild(conn: sa.Connection) -> list[Difference]:
    """Fold all entries through the book and compare with the tables; holds the append lock until the caller's end."""
    size = _head(conn, 0)
    accounts = {row.account: row.micros for row in conn.execute(sa.select(balances_table))}
    claims = {claim_id: tuple(fields) for claim_id, *fields in conn.execute(sa.select(claims_table))}
    return fsck.differences(size, _log(conn), accounts, claims)


def _head(conn: sa.Connection, by: int) -> int:
    """Lock the log until the caller's transaction ends; its size after the move."""
    size: int | None = conn.execute(_move_head, {"by": by}).scalar_one_or_none()
    if size is None:
        raise BookBroken("The ledger has no head row: `store.create` has not run, or the store is damaged.")
    return size


def _read_for(conn: sa.Connection, entry: Entry) -> State:
    """The part of the book that `book.step` reads for this entry."""
    node: NodeId | None = None
    claims: dict[str, Claim] = {}
    deposits: dict[str, Digest] = {}
    if isinstance(entry, Deposit):
        known = conn.execute(_deposit, {"effect": entry.effect}).scalar()
        if known is not None:
            deposits[entry.reference] = Digest(known)
    else:
        row = conn.execute(_claim, {"claim": entry.claim_id}).one_or_none()
        if row is not None:
            node = NodeId(row.node_id)
            state = ClaimState(row.state)
            claims[entry.claim_id] = Claim(node, state, row.amount_micros, row.tokens, Digest(row.entry_hash))
        elif isinstance(entry, Pending):
            node = entry.node_id
        else:
            return State()
    names = {str(account): account for account in book.route(entry, node)}
    rows = conn.execute(_accounts, {"names": list(names)})
    return State({names[name]: micros for name, micros in rows}, claims, deposits)


def _write_balances(conn: sa.Connection, before: State, changed: State) -> None:
    for account, micros in changed.balances.items():
        if account in before.balances:
            _replace(conn, _set_balance, {"name": str(account), "was": before.balances[account], "now": micros})
        else:
            conn.execute(sa.insert(balances_table), {"account": str(account), "micros": micros})


def _write_claims(conn: sa.Connection, before: State, changed: State) -> None:
    for claim_id, claim in changed.claims.items():
        if claim_id in before.claims:
            was = before.claims[claim_id].state
            _replace(conn, _set_state, {"claim": claim_id, "was": was.value, "now": claim.state.value})
        else:
            conn.execute(sa.insert(claims_table), {"claim_id": claim_id, **asdict(claim), "state": claim.state.value})


def _replace(conn: sa.Connection, statement: sa.Update, values: dict[str, str | int]) -> None:
    """Compare and set: the row must still be the one that the decision was made on."""
    if conn.execute(statement, values).rowcount != 1:
        raise BookBroken("A ledger row changed under the append lock: something else writes to the ledger's tables.")


def _page(conn: sa.Connection, start: int, limit: int) -> list[StoredEntry]:
    index = entries_table.c.index
    rows = conn.execute(sa.select(entries_table).where(index >= start).order_by(index).limit(limit))
    return [StoredEntry(*row) for row in rows]


def _log(conn: sa.Connection) -> Iterator[StoredEntry]:
    start = 0
    while page := _page(conn, start, PAGE_ENTRIES):
        yield from page
        start = page[-1].index + 1
