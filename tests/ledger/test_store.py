"""The store's contract: what is told, what is written, and what its checks notice."""

import sys
from collections import Counter
from typing import Any

import pytest
from sqlalchemy import Engine, delete, event, insert, update
from sqlalchemy.exc import IntegrityError

from ledger import store
from ledger.accounts import BUDGET, OUTSIDE, payable, pending
from ledger.book import BookBroken, EntryOutcome
from ledger.entry import Entry
from ledger.store import NodeTotals
from ledger.tables import (
    balances_table,
    checkpoint_table,
    claims_table,
    entries_table,
    head_table,
    metadata,
    tiles_table,
)
from tests.ledger import notes
from tests.ledger.engines import sqlite_memory
from tests.ledger.notes import KEY, PRIVATE
from tests.ledger.values import batch, claim, credit, deposit, node, paid, payout, post, void

NOW_MS = 1_700_000_000_000

LIFE: list[Entry] = [deposit(1_000), credit(1), credit(2), credit(3, of=2), post(1), void(2)]


def append(engine: Engine, *entries: Entry) -> list[EntryOutcome]:
    """Each entry in a transaction of its own."""
    outcomes = []
    for entry in entries:
        with engine.begin() as conn:
            outcomes.append(store.append(conn, entry, NOW_MS))
    return outcomes


def contents(engine: Engine) -> list[list[Any]]:
    with engine.connect() as conn:
        return [
            [tuple(row) for row in conn.execute(table.select().order_by(*table.primary_key))]
            for table in metadata.sorted_tables
        ]


def test_a_life_of_entries(engine: Engine) -> None:
    assert append(engine, *LIFE) == [EntryOutcome.APPLIED] * len(LIFE)
    with engine.begin() as conn:
        assert store.balances(conn) == {
            OUTSIDE: -1_000,
            BUDGET: 400,
            pending(node(1)): 0,
            payable(node(1)): 300,
            pending(node(2)): 300,
        }
        assert store.node_totals(conn) == [
            NodeTotals(node(1), pending_micros=0, posted_micros=300, voided_micros=300, posted_tokens=100),
            NodeTotals(node(2), pending_micros=300, posted_micros=0, voided_micros=0, posted_tokens=0),
        ]
        recorded = store.entries(conn, 0, 100)
        assert [row.entry for row in recorded] == LIFE
        assert [row.index for row in recorded] == list(range(len(LIFE)))
        assert all(row.content_hash == row.entry.content_hash and row.recorded_ms == NOW_MS for row in recorded)
        assert store.rebuild(conn) == []


def test_an_empty_ledger(engine: Engine) -> None:
    with engine.begin() as conn:
        assert store.balances(conn) == {}
        assert store.node_totals(conn) == []
        assert store.entries(conn, 0, 100) == []
        assert store.rebuild(conn) == []


def test_create_again_keeps_everything(engine: Engine) -> None:
    append(engine, *LIFE)
    before = contents(engine)
    with engine.begin() as conn:
        store.create(conn)
    assert contents(engine) == before


def test_entries_come_in_pages(engine: Engine) -> None:
    append(engine, *LIFE)
    with engine.connect() as conn:
        assert [row.entry for row in store.entries(conn, 1, 2)] == LIFE[1:3]
        assert [row.entry for row in store.entries(conn, 5, 2)] == LIFE[5:]
        assert store.entries(conn, 6, 2) == []


@pytest.mark.parametrize(
    ("entry", "outcome"),
    [
        (deposit(1_000), EntryOutcome.ALREADY_APPLIED),
        (deposit(1), EntryOutcome.CONFLICT),
        (deposit(2**62, "wire-2"), EntryOutcome.DEPOSIT_LIMIT),
        (credit(3, of=2), EntryOutcome.ALREADY_APPLIED),
        (credit(1), EntryOutcome.ALREADY_APPLIED),
        (credit(2), EntryOutcome.ALREADY_APPLIED),
        (credit(3), EntryOutcome.CONFLICT),
        (credit(4, tokens=200), EntryOutcome.BUDGET_EXHAUSTED),
        (post(1), EntryOutcome.ALREADY_POSTED),
        (void(1), EntryOutcome.ALREADY_POSTED),
        (post(2), EntryOutcome.ALREADY_VOIDED),
        (void(2), EntryOutcome.ALREADY_VOIDED),
        (void(2, "stale"), EntryOutcome.ALREADY_VOIDED),
        (post(4), EntryOutcome.UNKNOWN_CLAIM),
        (void(4), EntryOutcome.UNKNOWN_CLAIM),
    ],
    ids=str,
)
def test_refused_entry_changes_not_a_byte(engine: Engine, entry: Entry, outcome: EntryOutcome) -> None:
    append(engine, *LIFE)
    before = contents(engine)
    assert append(engine, entry) == [outcome]
    assert contents(engine) == before


def test_a_refusal_leaves_no_gap_in_the_log(engine: Engine) -> None:
    append(engine, deposit(1_000), post(7), credit(1))
    with engine.connect() as conn:
        assert [row.index for row in store.entries(conn, 0, 10)] == [0, 1]


def test_the_callers_rollback_takes_everything_back(engine: Engine) -> None:
    append(engine, deposit(1_000))
    before = contents(engine)
    with engine.connect() as conn:
        assert store.append(conn, credit(1), NOW_MS) is EntryOutcome.APPLIED
        conn.rollback()
    assert contents(engine) == before
    assert append(engine, credit(1)) == [EntryOutcome.APPLIED]


def test_many_entries_in_one_transaction(engine: Engine) -> None:
    with engine.begin() as conn:
        assert {store.append(conn, entry, NOW_MS) for entry in LIFE} == {EntryOutcome.APPLIED}
    with engine.begin() as conn:
        assert store.rebuild(conn) == []


def test_a_batch_costs_few_statements_and_each_entry_few_calls() -> None:
    """The basis of the ledger's rate, counted instead of timed; PostgreSQL's driver makes calls of its own."""
    engine, pairs = sqlite_memory(), 200
    with engine.begin() as conn:
        store.create(conn)
    statements: list[str] = []
    calls: Counter[str] = Counter()
    append(engine, deposit(10**12))
    event.listen(engine, "before_cursor_execute", lambda _conn, _cursor, text, *_rest: statements.append(text))
    for first in (1, 1 + pairs):
        batch = [made(number) for number in range(first, first + pairs) for made in (credit, post)]
        statements.clear()
        calls.clear()
        with engine.begin() as conn:
            sys.setprofile(lambda _frame, what, _argument: calls.update([what]))
            try:
                outcomes = store.append_all(conn, batch, NOW_MS)
            finally:
                sys.setprofile(None)
        assert outcomes == [EntryOutcome.APPLIED] * len(batch)
    # Head, claims, accounts, entries, accounts moved, claims made, each tile read and written, made or widened.
    assert len(statements) <= 10, statements
    assert calls["call"] / (2 * pairs) <= 25, calls
    engine.dispose()


def test_without_a_head_row_nothing_is_written() -> None:
    engine = sqlite_memory()
    with engine.begin() as conn:
        metadata.create_all(conn)
        with pytest.raises(BookBroken, match="no head row"):
            store.append(conn, deposit(1), NOW_MS)
    engine.dispose()


SECOND_SETTLEMENT = {"index": 99, "content_hash": "0" * 64, "kind": "void", "body": b"", "recorded_ms": 0}


@pytest.mark.parametrize(
    "write",
    [
        insert(entries_table).values({**SECOND_SETTLEMENT, "effect": post(1).effect}),
        update(balances_table).where(balances_table.c.account == "budget").values(micros=-1),
        insert(claims_table).values((claim(1), node(1), "pending", 1, 1, "0" * 64)),
        insert(head_table).values(id=1, size=0),
    ],
    ids=["second settlement", "debt", "same claim", "second head"],
)
def test_the_database_itself_refuses(engine: Engine, write: Any) -> None:
    append(engine, *LIFE)
    with engine.connect() as conn, pytest.raises(IntegrityError):
        conn.execute(write)


@pytest.mark.parametrize(
    ("damage", "where"),
    [
        (update(balances_table).where(balances_table.c.account == "budget").values(micros=401), "account budget"),
        (
            delete(balances_table).where(balances_table.c.account == str(payable(node(1)))),
            f"account {payable(node(1))}",
        ),
        (update(claims_table).where(claims_table.c.claim_id == claim(3)).values(state="posted"), f"claim {claim(3)}"),
        (update(claims_table).where(claims_table.c.claim_id == claim(3)).values(node_id=node(9)), f"claim {claim(3)}"),
        (insert(claims_table).values((claim(9), node(1), "pending", 1, 1, "0" * 64)), f"claim {claim(9)}"),
        (update(entries_table).where(entries_table.c.index == 3).values(kind="post"), "entry 3"),
        (update(entries_table).where(entries_table.c.index == 3).values(effect="settle:x"), "entry 3"),
        (update(entries_table).where(entries_table.c.index == 3).values(content_hash="0" * 64), "entry 3"),
        (update(entries_table).where(entries_table.c.index == 3).values(body=credit(3).to_bytes()), "entry 3"),
        (update(entries_table).where(entries_table.c.index == 3).values(body=b"?"), "entry 3"),
        (update(entries_table).where(entries_table.c.index == 5).values(body=post(1).to_bytes()), "entry 5"),
        (delete(entries_table).where(entries_table.c.index == 2), "index"),
        (delete(entries_table).where(entries_table.c.index == 5), "head"),
        (update(head_table).values(size=7), "head"),
        (update(tiles_table).values(hashes=bytes(6 * 32)), "tile 0/000.p/6"),
        (update(tiles_table).values(width=5), "tile 0/000.p/5"),
        (delete(tiles_table), "tile 0/000.p/6"),
        (insert(tiles_table).values((1, 0, 1, bytes(32))), "tile 1/000.p/1"),
        (update(checkpoint_table).values(root=bytes(32)), "checkpoint of 6 entries"),
        (update(checkpoint_table).values(size=5), "checkpoint of 5 entries"),
        (update(checkpoint_table).values(size=7), "checkpoint of 7 entries"),
        (update(checkpoint_table).values(note=notes.checkpoint(6)), "checkpoint's note"),
        (update(checkpoint_table).values(note=b"?"), "checkpoint's note"),
    ],
)
def test_rebuild_finds_damage_and_repairs_nothing(engine: Engine, damage: Any, where: str) -> None:
    append(engine, *LIFE)
    with engine.begin() as conn:
        store.publish(conn, KEY, PRIVATE.sign)
        conn.execute(damage)
    before = contents(engine)
    with engine.begin() as conn:
        assert where in {difference.where for difference in store.rebuild(conn)}
    assert contents(engine) == before


def test_rebuild_reads_more_than_a_page(engine: Engine) -> None:
    with engine.begin() as conn:
        store.append_all(conn, [deposit(1, f"wire-{number}") for number in range(store.PAGE_ENTRIES + 1)], NOW_MS)
        assert store.rebuild(conn) == []
        assert store.balances(conn)[BUDGET] == store.PAGE_ENTRIES + 1


EARNED: list[Entry] = [deposit(1_000), credit(1), credit(2, of=2), post(1), post(2)]
BEGUN: list[Entry] = [*EARNED, batch(1, micros=500, payees=2), payout(1)]


@pytest.mark.parametrize(
    ("path", "entry", "outcome"),
    [
        (EARNED, payout(1), EntryOutcome.UNKNOWN_BATCH),
        ([*EARNED, batch(1)], payout(11), EntryOutcome.UNKNOWN_BATCH),
        ([*EARNED, batch(11)], payout(1), EntryOutcome.UNKNOWN_BATCH),
        (BEGUN, payout(1, of=2, micros=201), EntryOutcome.BEYOND_BATCH),
        (BEGUN, paid(1), EntryOutcome.BATCH_INCOMPLETE),
        ([*BEGUN, payout(1, of=2, micros=100)], paid(1), EntryOutcome.BATCH_INCOMPLETE),
    ],
    ids=["no batch", "batch 1 for 11", "batch 11 for 1", "too much", "paid too soon", "paid before it is whole"],
)
def test_payout_outside_of_its_batch_changes_not_a_byte(
    engine: Engine, path: list[Entry], entry: Entry, outcome: EntryOutcome
) -> None:
    """Each entry in a transaction of its own: the store must find again what the batch says and holds."""
    append(engine, *path)
    before = contents(engine)
    assert append(engine, entry) == [outcome]
    assert contents(engine) == before


def test_batch_is_filled_and_paid_in_one_transaction_or_in_many(engine: Engine) -> None:
    shares = [payout(1), payout(1, of=2, micros=200)]
    ends = [paid(1), paid(1, of=2)]
    assert set(append(engine, *EARNED, batch(1, micros=500, payees=2), *shares, *ends)) == {EntryOutcome.APPLIED}
    again: list[Entry] = [credit(3), post(3), batch(11, payees=2), payout(11, micros=200), payout(11, of=2, micros=100)]
    with engine.begin() as conn:
        assert set(store.append_all(conn, [*again, paid(11), paid(11, of=2)], NOW_MS)) == {EntryOutcome.APPLIED}
        assert store.rebuild(conn) == []


def test_rebuild_finds_money_that_was_moved_outside_of_a_batch(engine: Engine) -> None:
    """An entry as a coordinator would write it that goes round the book."""
    append(engine, *BEGUN, payout(1, of=2, micros=200))
    moved = payout(2, of=2, micros=200)
    with engine.begin() as conn:
        conn.execute(
            update(entries_table)
            .where(entries_table.c.effect == payout(1, of=2).effect)
            .values(body=moved.to_bytes(), effect=moved.effect, content_hash=moved.content_hash)
        )
    with engine.begin() as conn:
        found = {difference.where: difference.found for difference in store.rebuild(conn)}
    assert found["entry 7"] == "unknown_batch"
