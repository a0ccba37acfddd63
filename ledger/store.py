"""The ledger's tables: the entries, and the balances, claims and tiles that are computed from them.

- All functions use the caller's connection, inside the caller's transaction: none begins or commits one, so "rollout
  accepted" and "credit pending" can be one effect. An entry counts when that transaction has committed.
- `append` locks the head row first: appends of all processes follow each other, indexes have no gaps, and on SQLite the
  transaction is a writer before it reads. Keep such transactions short.
- `book.step` works on the few rows that `ledger.parts` reads for it and then writes.
- Many entries in one call are one pass over the tables: rows that a batch shares are read and written once.
- A checkpoint is stored by the transaction that signed it, after a comparison with the previous one: its tree must
  begin with all that was ever signed, else nothing is signed. Serve it when the transaction has committed.
- Constraints back up the code: one row per effect, which follows from an entry's content; only `outside` may be below
  zero.
- The SQL is portable: SQLite (the caller sets WAL and synchronous=FULL), PostgreSQL (read committed or stricter).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import sqlalchemy as sa

from ledger import book, fsck, note, parts, tiles, tree
from ledger.accounts import Account
from ledger.book import BookBroken, ClaimState, EntryOutcome
from ledger.checkpoint import Checkpoint, Sign
from ledger.checkpoint import sign as sign_checkpoint
from ledger.entry import Entry, parse
from ledger.fsck import Difference, StoredEntry
from ledger.note import NoteKey
from ledger.prepared import Prepared
from ledger.proof import Proven
from ledger.tables import (
    balances_table,
    checkpoint_table,
    claims_table,
    entries_table,
    head_table,
    metadata,
    tiles_table,
)
from ledger.tiles import Tile
from ledger.tree import HASH_BYTES, Hash, leaf_hash
from protocol.errors import NotFound
from protocol.ids import Digest, NodeId

CLAIM_EFFECTS = ("pending", "settle", "reinstate")
"""The kinds of the effects of a claim's entries."""

PAGE_ENTRIES = 1_000
"""Entries that `rebuild` holds in memory at a time."""

# Built once: building a statement costs more than running it.
_move_head = Prepared(
    sa.update(head_table).values(size=head_table.c.size + sa.bindparam("by")).returning(head_table.c.size)
)
_place = (tiles_table.c.level == sa.bindparam("at_level"), tiles_table.c.number == sa.bindparam("at"))
_tile = Prepared(sa.select(tiles_table.c.hashes).where(*_place))
_widen_tile = Prepared(
    sa.update(tiles_table)
    .where(*_place, tiles_table.c.width == sa.bindparam("was"))
    .values(width=sa.bindparam("now"), hashes=sa.bindparam("data"))
)


@dataclass(frozen=True, slots=True)
class Recorded:
    """An entry of the log."""

    index: int
    entry: Entry
    content_hash: Digest
    recorded_ms: int


@dataclass(frozen=True, slots=True)
class NodeTotals:
    """The earnings of a node by the state of its claims; the tokens are those of posted claims."""

    node_id: NodeId
    pending_micros: int
    posted_micros: int
    voided_micros: int
    posted_tokens: int


def create(conn: sa.Connection) -> None:
    """Create the tables and the empty log if they are missing."""
    metadata.create_all(conn)
    if conn.execute(sa.select(head_table.c.size)).first() is None:
        conn.execute(sa.insert(head_table).values(id=0, size=0))


def begin_again(conn: sa.Connection) -> None:
    """Delete all entries of a log that was never signed: nobody has relied on them."""
    if conn.execute(sa.select(checkpoint_table.c.size)).first() is not None:
        raise BookBroken("A signed log cannot begin again: its readers would detect a fork.")
    for table in metadata.sorted_tables:
        if table is not head_table:
            conn.execute(sa.delete(table))
    conn.execute(sa.update(head_table).values(size=0))


def append(conn: sa.Connection, entry: Entry, now_ms: int) -> EntryOutcome:
    """Apply and record an entry; return the outcome, which says why if it changes nothing."""
    return append_all(conn, [entry], now_ms)[0]


def append_all(conn: sa.Connection, entries: Sequence[Entry], now_ms: int) -> list[EntryOutcome]:
    """Apply and record entries in order; a refused one does not affect the others."""
    size = _head(conn, len(entries)) - len(entries)
    before = parts.read_for(conn, entries)
    after, refused = book.fold(enumerate(entries), before)
    applied = [entry for number, entry in enumerate(entries) if number not in refused]
    if refused:
        _head(conn, -len(refused))
    if applied:
        _write_entries(conn, size, applied, now_ms)
        parts.write(conn, before, after)
        _write_tiles(conn, size, [leaf_hash(entry.body) for entry in applied])
    return [refused.get(number, EntryOutcome.APPLIED) for number in range(len(entries))]


def publish(conn: sa.Connection, key: NoteKey, signature_of: Sign, limit: int | None = None) -> bytes:
    """Sign and return a checkpoint of the current log, after the check that it continues the last one.

    Entries beyond `limit` are not signed yet: a standby copy does not have them.
    """
    size = _head(conn, 0)
    last = conn.execute(sa.select(checkpoint_table)).one_or_none()
    if limit is not None:
        size = min(size, max(limit, last.size if last is not None else 0))
    hash_of = tiles.hashes_in(size, lambda tile: _own_tile(conn, tile))
    if last is not None:
        if last.size > size or tree.root(last.size, hash_of) != last.root:
            raise BookBroken(
                f"The log does not begin with the {last.size} entries that were signed. No checkpoint was signed."
            )
        if last.size == size and note.parse(last.note).signature_by(key):
            return bytes(last.note)
    signed = Checkpoint(key.name, size, tree.root(size, hash_of))
    signed_note = sign_checkpoint(signed, key, signature_of)
    row = {"size": size, "root": signed.root, "note": signed_note}
    conn.execute(sa.insert(checkpoint_table).values(id=0) if last is None else sa.update(checkpoint_table), row)
    return signed_note


def checkpoint(conn: sa.Connection) -> bytes | None:
    """Return the last signed checkpoint; None before the first."""
    return conn.execute(sa.select(checkpoint_table.c.note)).scalar()


def root_at(conn: sa.Connection, size: int) -> Hash:
    """Return the root of the log's first `size` entries."""
    return tree.root(size, tiles.hashes_in(size, lambda tile: _read_tile(conn, tile)))


def prove_growth(conn: sa.Connection, old: int, new: int) -> list[Hash]:
    """Return the RFC 6962 proof that the first `new` entries begin with the first `old`."""
    if old in (0, new):
        return []
    hash_of = tiles.hashes_in(new, lambda tile: _read_tile(conn, tile))
    return tree.without_seed(old, new, tree.prove(tree.consistency_ranges(old, new), hash_of))


def read_file(conn: sa.Connection, tile: Tile) -> bytes:
    """Return a tile or a bundle of the log, with the width of `tile`."""
    if tile.level != Tile.BUNDLE:
        return _read_tile(conn, tile)
    bodies = [row.body for row in _page(conn, tile.first, tile.width)]
    if len(bodies) != tile.width:
        raise NotFound(f"The log ends before the end of bundle {tile.name}.")
    return tiles.bundle(bodies)


def prove_claim(conn: sa.Connection, claim_id: str) -> tuple[bytes, list[Proven]]:
    """Return the last checkpoint, and a claim's entries with the proofs that it covers them."""
    names = [f"{kind}:{claim_id}" for kind in CLAIM_EFFECTS]
    return prove(conn, names, about=f"claim {claim_id[:16]}…")


def prove_claims(conn: sa.Connection, claims: Sequence[str]) -> tuple[bytes, dict[str, list[Proven]]]:
    """Return the last checkpoint, and for each claim its published entries with proofs; none if it has none yet."""
    last = conn.execute(sa.select(checkpoint_table)).one_or_none()
    if last is None:
        raise NotFound("No checkpoint is signed yet.", hint="Try again in a few seconds.")
    names = {f"{kind}:{claim}": claim for claim in claims for kind in CLAIM_EFFECTS}
    cols = entries_table.c
    stmt = sa.select(cols.index, cols.effect, cols.body).where(cols.effect.in_(names), cols.index < last.size)
    hash_of = cache(tiles.hashes_in(last.size, lambda tile: _read_tile(conn, tile)))
    found: dict[str, list[Proven]] = {claim: [] for claim in claims}
    for index, effect, body in conn.execute(stmt.order_by(cols.index)):
        proof = tuple(tree.prove(tree.inclusion_ranges(index, last.size), hash_of))
        found[names[effect]].append(Proven(index=index, entry=body, proof=proof))
    return last.note, found


def prove(conn: sa.Connection, effects: Sequence[str], *, about: str) -> tuple[bytes, list[Proven]]:
    """Return the last checkpoint, and the published entries of `effects` with proofs; the first must be published."""
    last = conn.execute(sa.select(checkpoint_table)).one_or_none()
    cols = entries_table.c
    rows = conn.execute(sa.select(cols.index, cols.body).where(cols.effect.in_(effects)).order_by(cols.index)).all()
    if last is None or not rows or rows[0].index >= last.size:
        raise NotFound(f"No published entry is about {about}.", hint="Wait for the next checkpoint.")
    hash_of = tiles.hashes_in(last.size, lambda tile: _read_tile(conn, tile))
    return last.note, [
        Proven(index=index, entry=body, proof=tuple(tree.prove(tree.inclusion_ranges(index, last.size), hash_of)))
        for index, body in rows
        if index < last.size
    ]


def find(conn: sa.Connection, effect: str) -> Recorded | None:
    """Return the entry with this effect; None if there is none."""
    row = conn.execute(sa.select(entries_table).where(entries_table.c.effect == effect)).first()
    if row is None:
        return None
    stored = StoredEntry(*row)
    return Recorded(stored.index, parse(stored.body), Digest(stored.content_hash), stored.recorded_ms)


def size(conn: sa.Connection) -> int:
    """Return the number of entries."""
    return int(conn.execute(sa.select(head_table.c.size)).scalar_one())


def balance(conn: sa.Connection, account: Account) -> int:
    """Return the balance of an account; 0 if it never moved."""
    return sum(parts.balances_of(conn, [account]).values())


def balances(conn: sa.Connection) -> dict[Account, int]:
    """Return the balance of every account that ever moved."""
    rows = conn.execute(sa.select(balances_table.c.account, balances_table.c.micros))
    return {Account.parse(account): micros for account, micros in rows}


def node_totals(conn: sa.Connection) -> list[NodeTotals]:
    """Return the totals of every node that ever had a claim, the best earner first."""
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
    """Return up to `limit` entries from index `start` on."""
    return [
        Recorded(row.index, parse(row.body), Digest(row.content_hash), row.recorded_ms)
        for row in _page(conn, start, limit)
    ]


def rebuild(conn: sa.Connection, *, locked: bool = True) -> list[Difference]:
    """Fold all entries and compare the result with the tables; hold the append lock until the transaction ends.

    Without `locked` it takes no lock: for a snapshot that nobody else writes to.
    """
    size_now = _head(conn, 0) if locked else size(conn)
    accounts = {row.account: row.micros for row in conn.execute(sa.select(balances_table))}
    claims = {claim_id: tuple(rest) for claim_id, *rest in conn.execute(sa.select(claims_table))}
    kept = {Tile(*place): bytes(hashes) for *place, hashes in conn.execute(sa.select(tiles_table))}
    cols = checkpoint_table.c
    signed = conn.execute(sa.select(cols.size, cols.root, cols.note)).one_or_none()
    return fsck.differences(
        size_now, _log(conn), fsck.KeptTables(accounts, claims, kept, tuple(signed) if signed else None)
    )


def _head(conn: sa.Connection, by: int) -> int:
    """Lock the log until the caller's transaction ends, and add `by` to its size; return the new size."""
    size: int | None = _move_head(conn, by=by).scalar()
    if size is None:
        raise BookBroken("The ledger has no head row: `store.create` has not run, or the store is damaged.")
    return size


def _write_entries(conn: sa.Connection, size: int, applied: list[Entry], now_ms: int) -> None:
    parts.insert(
        conn,
        entries_table,
        [
            (index, entry.content_hash, entry.effect, entry.kind, entry.body, now_ms)
            for index, entry in enumerate(applied, size)
        ],
    )


def _write_tiles(conn: sa.Connection, size: int, leaves: list[Hash]) -> None:
    before: dict[tuple[int, int], int] = {}

    def read(tile: Tile) -> bytes:
        before[tile.level, tile.number] = tile.width
        return _own_tile(conn, tile)

    made, widened = [], []
    for tile, data in tiles.grown(size, leaves, read):
        was = before.get((tile.level, tile.number))
        if was is None:
            made.append((tile.level, tile.number, tile.width, data))
        else:
            place = {"at_level": tile.level, "at": tile.number}
            widened.append({**place, "was": was, "now": tile.width, "data": data})
    parts.insert(conn, tiles_table, made)
    parts.replace(conn, _widen_tile, widened)


def _own_tile(conn: sa.Connection, tile: Tile) -> bytes:
    """Return a tile that the log must have, because of its size."""
    try:
        return _read_tile(conn, tile)
    except NotFound:
        raise BookBroken(f"Tile {tile.name} of the log is missing or too short: the store is damaged.") from None


def _read_tile(conn: sa.Connection, tile: Tile) -> bytes:
    """Return the first `tile.width` hashes of a tile, which may have grown since."""
    data = _tile(conn, at_level=tile.level, at=tile.number).scalar()
    wanted = tile.width * HASH_BYTES
    if data is None or len(data) < wanted:
        raise NotFound(f"The log does not reach to the end of tile {tile.name}.")
    return bytes(data[:wanted])


def _page(conn: sa.Connection, start: int, limit: int) -> list[StoredEntry]:
    index = entries_table.c.index
    rows = conn.execute(sa.select(entries_table).where(index >= start).order_by(index).limit(limit))
    return [StoredEntry(*row) for row in rows]


def _log(conn: sa.Connection) -> Iterator[StoredEntry]:
    start = 0
    while page := _page(conn, start, PAGE_ENTRIES):
        yield from page
        start = page[-1].index + 1
