"""The store as a log: batches, files, receipts, and no checkpoint against what was signed before."""

from typing import Any

import pytest
from sqlalchemy import Engine, delete, update

from ledger import store, tiles
from ledger.book import BookBroken, EntryOutcome
from ledger.checkpoint import ledger_key, open_checkpoint
from ledger.entry import Entry
from ledger.tables import checkpoint_table, head_table, tiles_table
from ledger.tiles import Tile
from ledger.tree import check_inclusion, leaf_hash
from protocol.errors import NotFound
from tests.ledger import naive_tree
from tests.ledger.notes import KEY, PRIVATE, ROUND_ID, THIEF
from tests.ledger.values import claim, credit, deposit, post, root, version, void

LIFE: list[Entry] = [deposit(1_000), root(1), version(1), credit(1), credit(2), credit(3, of=2), post(1)]


def append(engine: Engine, *entries: Entry) -> list[EntryOutcome]:
    with engine.begin() as conn:
        return store.append_all(conn, entries, 0)


def publish(engine: Engine) -> bytes:
    with engine.begin() as conn:
        return store.publish(conn, KEY, PRIVATE.sign)


def test_a_batch_says_of_each_entry_what_one_by_one_would_say(engine: Engine) -> None:
    batch = [*LIFE, deposit(1_000), credit(1), credit(9, tokens=1_000), post(1), void(1), post(7), version(1), void(2)]
    assert append(engine, *batch) == [EntryOutcome.APPLIED] * len(LIFE) + [
        EntryOutcome.ALREADY_APPLIED,
        EntryOutcome.ALREADY_APPLIED,
        EntryOutcome.BUDGET_EXHAUSTED,
        EntryOutcome.ALREADY_POSTED,
        EntryOutcome.ALREADY_POSTED,
        EntryOutcome.UNKNOWN_CLAIM,
        EntryOutcome.ALREADY_APPLIED,
        EntryOutcome.APPLIED,
    ]
    with engine.begin() as conn:
        assert [row.entry for row in store.entries(conn, 0, 100)] == [*LIFE, void(2)]
        assert store.size(conn) == len(LIFE) + 1
        assert store.rebuild(conn) == []


def test_a_batch_larger_than_a_tile_and_a_question(engine: Engine) -> None:
    many = [credit(number, price=0, of=number % 600) for number in range(700)]
    append(engine, deposit(1), *many[:300])
    assert append(engine, *many) == [EntryOutcome.ALREADY_APPLIED] * 300 + [EntryOutcome.APPLIED] * 400
    bodies = [entry.body for entry in (deposit(1), *many)]
    assert open_checkpoint(publish(engine), [KEY]).root == naive_tree.mth(bodies)
    with engine.begin() as conn:
        assert store.rebuild(conn) == []
        full, partial = Tile(Tile.BUNDLE, 1), Tile(Tile.BUNDLE, 2, 100)
        assert tiles.unbundle(store.read_file(conn, full), 256) == bodies[256:512]
        assert tiles.unbundle(store.read_file(conn, partial), 100) == bodies[512:612]
        assert store.read_file(conn, Tile(0, 1, 3)) == b"".join(map(leaf_hash, bodies[256:259]))
        assert len(store.read_file(conn, Tile(1, 0, 2))) == 64
        for beyond in (Tile(0, 2), Tile(0, 3, 1), Tile(1, 0, 3), Tile(2, 0, 1), Tile(Tile.BUNDLE, 2), Tile(99, 0, 1)):
            with pytest.raises(NotFound):
                store.read_file(conn, beyond)


def test_the_same_log_has_the_same_checkpoint(engine: Engine) -> None:
    assert open_checkpoint(publish(engine), [KEY]).size == 0
    append(engine, *LIFE)
    first = publish(engine)
    assert open_checkpoint(first, [KEY]).root == naive_tree.mth([entry.body for entry in LIFE])
    with engine.begin() as conn:
        assert store.publish(conn, KEY, lambda _text: pytest.fail("nothing new was to be signed")) == first
        assert store.checkpoint(conn) == first


def test_a_new_key_signs_the_same_log_again(engine: Engine) -> None:
    append(engine, *LIFE)
    publish(engine)
    successor = ledger_key(ROUND_ID, THIEF.public_key().public_bytes_raw())
    with engine.begin() as conn:
        assert open_checkpoint(store.publish(conn, successor, THIEF.sign), [successor]).size == len(LIFE)


@pytest.mark.parametrize(
    "attack",
    [
        update(tiles_table).values(hashes=bytes(32 * (len(LIFE) + 1)), width=len(LIFE) + 1),
        update(checkpoint_table).values(root=bytes(32)),
        update(checkpoint_table).values(size=99),
        update(head_table).values(size=3),
    ],
    ids=["rewritten history", "another root was signed", "more was signed", "truncated log"],
)
def test_nothing_is_signed_against_what_was_signed_before(engine: Engine, attack: Any) -> None:
    append(engine, *LIFE)
    publish(engine)
    append(engine, void(2))
    with engine.begin() as conn:
        conn.execute(attack)
        with pytest.raises(BookBroken, match="No checkpoint was signed"):
            store.publish(conn, KEY, lambda _text: pytest.fail("it was signed"))


def test_tiles_that_are_gone_are_a_broken_book_and_nobody_elses_fault(engine: Engine) -> None:
    append(engine, *LIFE)
    with engine.connect() as conn:
        conn.execute(delete(tiles_table))
        with pytest.raises(BookBroken, match="Tile"):
            store.append(conn, void(2), 0)
        conn.rollback()
    with engine.begin() as conn:
        conn.execute(delete(tiles_table))
    with engine.connect() as conn, pytest.raises(BookBroken, match="Tile"):
        store.publish(conn, KEY, lambda _text: pytest.fail("it was signed"))


def test_receipts_of_many_claims_are_those_of_each(engine: Engine) -> None:
    append(engine, *LIFE)
    with engine.begin() as conn, pytest.raises(NotFound):
        store.prove_claims(conn, [claim(1)])
    publish(engine)
    append(engine, void(2), credit(4, price=0))
    with engine.begin() as conn:
        note, found = store.prove_claims(conn, [claim(99), *map(claim, (3, 1, 2, 4))])
        assert list(found) == [claim(99), *map(claim, (3, 1, 2, 4))]
        for number in (1, 2, 3):
            assert (note, found[claim(number)]) == store.prove_claim(conn, claim(number))
        assert found[claim(99)] == found[claim(4)] == [], "nothing of them is published"


def test_receipt_of_a_claim_has_all_that_is_published_of_it(engine: Engine) -> None:
    append(engine, *LIFE)
    with engine.begin() as conn, pytest.raises(NotFound):
        store.prove_claim(conn, claim(1))
    publish(engine)
    append(engine, void(2), credit(4, price=0))
    with engine.begin() as conn:
        published: dict[int, list[Entry]] = {1: [credit(1), post(1)], 2: [credit(2)], 3: [credit(3, of=2)]}
        for number, entries in published.items():
            note, found = store.prove_claim(conn, claim(number))
            signed = open_checkpoint(note, [KEY])
            assert [item.entry for item in found] == [entry.body for entry in entries]
            for item in found:
                check_inclusion(item.entry, item.index, signed.size, signed.root, item.proof)
        for unknown in (claim(4), claim(99)):
            with pytest.raises(NotFound):
                store.prove_claim(conn, unknown)
