"""Two connections, one ledger: whoever comes second is told so, and nothing happens twice."""

from collections import Counter
from threading import Barrier, Thread

import pytest
from sqlalchemy import Engine

from ledger import store
from ledger.book import EntryOutcome
from ledger.entry import Entry
from tests.ledger.conftest import Connect
from tests.ledger.values import credit, deposit, post, void

ROUNDS = 10
"""Fresh claims to fight over; each round is another chance to meet in the middle."""


def race(connect: Connect, left: Entry, right: Entry) -> list[EntryOutcome]:
    """Append both at once from two threads with a connection each; their outcomes in the order of the arguments."""
    barrier = Barrier(2)
    outcomes: dict[int, EntryOutcome] = {}

    def run(side: int, engine: Engine, entry: Entry) -> None:
        with engine.connect() as conn:
            barrier.wait(timeout=30)
            outcomes[side] = store.append(conn, entry, 0)
            conn.commit()

    engines = [connect(), connect()]
    threads = [Thread(target=run, args=(side, engines[side], entry)) for side, entry in enumerate((left, right))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for engine in engines:
        engine.dispose()
    return [outcomes[0], outcomes[1]]


@pytest.fixture
def ledger(connect: Connect) -> Connect:
    """A deposit for exactly two claims per round, and a pending claim for each round."""
    engine = connect()
    with engine.begin() as conn:
        pending = [credit(number, tokens=50) for number in range(ROUNDS)]
        store.append_all(conn, [deposit(300 * ROUNDS), *pending], 0)
    engine.dispose()
    return connect


def assert_sound(connect: Connect, size: int) -> None:
    engine = connect()
    with engine.begin() as conn:
        assert store.rebuild(conn) == []
        assert len(store.entries(conn, 0, 1_000)) == size
    engine.dispose()


def test_same_post_from_two_connections_pays_once(ledger: Connect) -> None:
    for number in range(ROUNDS):
        assert sorted(race(ledger, post(number), post(number))) == [EntryOutcome.ALREADY_POSTED, EntryOutcome.APPLIED]
    assert_sound(ledger, 1 + 2 * ROUNDS)


def test_post_against_void_has_one_winner_and_the_loser_hears_of_it(ledger: Connect) -> None:
    for number in range(ROUNDS):
        found = race(ledger, post(number), void(number))
        assert found in (
            [EntryOutcome.APPLIED, EntryOutcome.ALREADY_POSTED],
            [EntryOutcome.ALREADY_VOIDED, EntryOutcome.APPLIED],
        )
    assert_sound(ledger, 1 + 2 * ROUNDS)


def test_same_rollout_submitted_twice_at_once_is_credited_once(ledger: Connect) -> None:
    for number in range(ROUNDS, ROUNDS + 5):
        found = race(ledger, credit(number), credit(number))
        assert sorted(found) == [EntryOutcome.ALREADY_APPLIED, EntryOutcome.APPLIED]
    assert_sound(ledger, 1 + ROUNDS + 5)


def test_last_of_the_budget_is_spent_once(ledger: Connect) -> None:
    """150 × ROUNDS are left and each side wants more than half of it."""
    tokens = 50 * ROUNDS - 1
    found = race(ledger, credit(ROUNDS, tokens=tokens), credit(ROUNDS + 1, tokens=tokens, of=2))
    assert Counter(found) == {EntryOutcome.APPLIED: 1, EntryOutcome.BUDGET_EXHAUSTED: 1}
    assert_sound(ledger, 1 + ROUNDS + 1)
