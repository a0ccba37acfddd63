"""Payouts from two sides in the same moment: one batch holds each amount, and the other side is told so by name.

- Two real processes stand at a gate, the store's writer lock, which the test holds until both have come. Which of them
  is first is the database's affair; a seed draws who is called first.
- One side does everything between two transactions of the other, at each of these moments: what a race can come to.
"""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest
import sqlalchemy as sa

from coordinator.store.facts import Fact, get_fact, set_fact
from coordinator.store.state import Database, PayoutBusy, engine
from coordinator.transactions import owners, payouts
from coordinator.transactions.rails.base import Manual
from ledger import store
from ledger.accounts import AccountKind
from ledger.entry import Paid, Payout
from protocol.errors import SwarmError
from protocol.people.owner import PayoutAddress, seal_statement
from protocol.wire.signing import NodeKey
from tests.coordinator.bank import Bank
from tests.coordinator.transactions.test_payouts import TERMS, owe, owner, publish
from tests.coordinator.world import NOW_MS, ROUND, World
from tests.processes.programs import until

N = Fact("n", 0)

TRIES = 3
"""Tries of each pair, each with a seed of its own."""

OWED = 600
LATER_MS = NOW_MS + 1_000_000

Act = Callable[[Database, Path], str]


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    """Return the URL of the store; empty for a file in the test's folder."""
    return str(request.getfixturevalue("postgres_url")) if request.param == "postgres" else ""


def indebted(folder: Path, url: str, *, batch: bool) -> World:
    """A round that owes two owners, one of them by two nodes, under a signed checkpoint; or has a batch of that."""
    folder.mkdir()
    world = World(folder, postgres_url=url)
    for key in (*owner(1, world, nodes=2), *owner(2, world)):
        owe(world, key, OWED // 3)
    publish(world)
    if batch:
        world.run(payouts.create, TERMS, now_ms=LATER_MS)
    return world


def make(database: Database, _folder: Path) -> str:
    return f"batch {database.run_now(payouts.create, TERMS, now_ms=LATER_MS)}"


def settle_by(reference: str) -> Act:
    def settle(database: Database, _folder: Path) -> str:
        row, batch = database.run_now(payouts.load, 1, ROUND)
        return payouts.settle(database, row, batch, Manual(reference), now_ms=LATER_MS).value

    return settle


def settle_at_the_bank(database: Database, folder: Path) -> str:
    row, batch = database.run_now(payouts.load, 1, ROUND)
    return payouts.settle(database, row, batch, Bank(folder / "bank"), now_ms=LATER_MS).value


def alone(act: Act) -> Act:
    """Run an act alone, as the commands do."""

    def act_alone(database: Database, folder: Path) -> str:
        with database.alone():
            return act(database, folder)

    return act_alone


def move_away(database: Database, _folder: Path) -> str:
    """The first owner is paid somewhere else, at once."""
    word = seal_statement(
        NodeKey((1_001).to_bytes(32)), PayoutAddress(round_id=ROUND, address="text:elsewhere", number=2_000)
    )
    reply = database.run_now(owners.record_statement, word, round_id=ROUND, scheme="", delay_ms=0, now_ms=LATER_MS)
    return reply.outcome


PAIRS: dict[str, tuple[bool, Act, Act, set[str]]] = {
    "create-create": (False, make, make, {"batch 1", "payout_failed"}),
    "create-address": (False, make, move_away, {"batch 1", "recorded"}),
    "settle-create": (True, settle_by("SEPA-1"), make, {"done", "payout_failed"}),
    "settle-settle-same": (True, settle_by("SEPA-1"), settle_by("SEPA-1"), {"done"}),
    "settle-settle-other": (True, settle_by("SEPA-1"), settle_by("SEPA-2"), {"done", "payout_failed"}),
    "settle-settle-bank": (True, alone(settle_at_the_bank), alone(settle_at_the_bank), {"done", "payout_busy"}),
}
"""Pairs of acts: whether a batch is there before, what meets what, and what may be said of that."""


def named(act: Act, database: Database, folder: Path) -> str:
    try:
        return act(database, folder)
    except SwarmError as error:
        return error.code


def check(world: World, folder: Path) -> None:
    """Each amount is in one batch, was sent once, and no money was made or lost."""
    assert world.run(store.rebuild) == []
    balances = world.run(store.balances)
    assert sum(balances.values()) == 0
    kinds = (AccountKind.PAYABLE, AccountKind.PAYING, AccountKind.PAID)
    assert sum(micros for at, micros in balances.items() if at.kind in kinds) == OWED
    entries = [row.entry for row in world.run(store.entries, 0, 1_000)]
    shares = [entry for entry in entries if isinstance(entry, Payout)]
    assert [share.batch for share in shares] == [1, 1, 1]
    assert len({share.node_id for share in shares}) == 3
    (row,) = world.run(payouts.listed)
    _, batch = world.run(payouts.load, 1, ROUND)
    assert batch.amount_micros == OWED
    assert len(Bank(folder / "bank").transfers) <= 1
    settled = [entry for entry in entries if isinstance(entry, Paid)]
    assert {entry.reference for entry in settled} == (
        {row.reference} if row.state is payouts.BatchState.SETTLED else set()
    )


@contextmanager
def gate(world: World, sides: int) -> Iterator[None]:
    """Let all sides wait before any of them writes; on SQLite waiting sides are not visible."""
    made = engine(world.where)
    with made.connect() as holder, made.connect() as watcher:
        on_file = isinstance(world.where, Path)
        holder.exec_driver_sql("BEGIN IMMEDIATE" if on_file else "BEGIN")
        if not on_file:
            holder.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
            holder.exec_driver_sql("SELECT pg_advisory_xact_lock(1)")
        yield
        waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        if not on_file:
            until("all sides at the gate", lambda: watcher.exec_driver_sql(waiting).scalar() == sides)
        holder.exec_driver_sql("ROLLBACK")
    made.dispose()


class Side:
    """A process that opens the store, says so, and acts when it is told to."""

    def __init__(self, world: World, folder: Path, act: Act) -> None:
        (self._told, told), (start, self._start) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(told)
            os.close(start)
            assert os.read(self._told, 1) == b"!"
            return
        with suppress(BaseException):
            database = Database(world.where)
            os.write(told, b"!")
            os.read(start, 1)
            os.write(told, named(act, database, folder).encode())
        os._exit(0)

    def go(self) -> None:
        os.write(self._start, b"!")

    def end(self) -> str:
        """Return the result; None if it failed without an error code."""
        os.waitpid(self.pid, 0)
        said = os.read(self._told, 100).decode()
        os.close(self._told)
        os.close(self._start)
        return said


@pytest.mark.parametrize("pair", PAIRS)
def test_payouts_from_two_processes_in_the_same_moment_pay_once(pair: str, url: str, tmp_path: Path) -> None:
    batch, one, other, names = PAIRS[pair]
    for seed in range(TRIES):
        folder = tmp_path / str(seed)
        world = indebted(folder, url, batch=batch)
        world.database.close()
        sides = [Side(world, folder, act) for act in (one, other)]
        with gate(world, 1 if "bank" in pair else 2):
            for side in random.Random(seed).sample(sides, 2):
                side.go()
        told = [side.end() for side in sides]
        assert set(told) <= names, f"seed {seed}: {told}"
        assert {"done", "batch 1"} & set(told), f"seed {seed}: {told}"
        world.database = Database(world.where)
        check(world, folder)
        world.database.close()


@pytest.mark.parametrize("turned", [False, True], ids=["as-is", "turned"])
@pytest.mark.parametrize("pair", [name for name in PAIRS if "bank" not in name])
def test_whatever_one_side_does_between_two_transactions_of_the_other(
    pair: str, turned: bool, url: str, tmp_path: Path
) -> None:
    batch, *acts, names = PAIRS[pair]
    one, other = reversed(acts) if turned else acts
    for moment in count():
        folder = tmp_path / str(moment)
        world = indebted(folder, url, batch=batch)
        told: list[str] = []
        begun = count()

        def step(
            _connection: object, _cursor: object, statement: str, *_rest: object,
            told: list[str] = told, begun: Iterator[int] = begun, moment: int = moment, folder: Path = folder,
            where: Path | str = world.where,
        ) -> None:  # fmt: skip
            if statement.startswith("BEGIN") and next(begun) == moment:
                database = Database(where)
                told.append(named(other, database, folder))
                database.close()

        sa.event.listen(world.database._engine, "before_cursor_execute", step)
        told.append(named(one, world.database, folder))
        sa.event.remove(world.database._engine, "before_cursor_execute", step)
        if len(told) == 1:
            world.database.close()
            break
        assert set(told) <= names, f"moment {moment}: {told}"
        assert {"done", "batch 1"} & set(told), f"moment {moment}: {told}"
        check(world, folder)
        world.database.close()
    assert moment > 0


def test_second_hand_at_the_payouts_is_turned_away_by_name(url: str, tmp_path: Path) -> None:
    """Rails are called by one command at a time: two could ask a bank at once whether it knows a batch."""
    world = indebted(tmp_path / "round", url, batch=True)
    other = Database(world.where)
    with world.database.alone(), pytest.raises(PayoutBusy), other.alone():
        raise AssertionError
    with other.alone():
        other.run_now(payouts.listed)  # and the store goes on meanwhile
    other.close()
    world.database.close()


def test_hand_of_a_command_that_was_killed_is_free(url: str, tmp_path: Path) -> None:
    world = indebted(tmp_path / "round", url, batch=True)
    world.database.close()

    def die(_database: Database, _folder: Path) -> str:
        os.kill(os.getpid(), 9)
        return "never"

    side = Side(world, tmp_path, alone(die))
    side.go()
    assert side.end() == ""
    world.database = Database(world.where)

    def free() -> bool:
        with suppress(PayoutBusy), world.database.alone():
            return True
        return False

    until("the hand to be free", free)
    world.database.close()


def test_effects_follow_each_other_whatever_the_role_is_set_to(postgres_url: str, tmp_path: Path) -> None:
    """A snapshot taken before the writer lock is granted would show a store in which nobody has been paid yet."""
    made = engine(postgres_url)
    with made.connect() as connection:
        connection.exec_driver_sql("ALTER ROLE postgres SET default_transaction_isolation = 'serializable'")
    try:
        world = indebted(tmp_path / "round", postgres_url, batch=False)
        world.database.close()

        def increment(database: Database, _folder: Path) -> str:
            def effect(connection: sa.Connection) -> str:
                set_fact(connection, N, get_fact(connection, N) + 1)
                return "counted"

            return database.run_now(effect)

        sides = [Side(world, tmp_path, increment) for _ in range(2)]
        with gate(world, 2):
            for side in sides:
                side.go()
        assert [side.end() for side in sides] == ["counted", "counted"]
        world.database = Database(world.where)
        assert world.run(get_fact, N) == 2
        world.database.close()
    finally:
        with made.connect() as connection:
            connection.exec_driver_sql("ALTER ROLE postgres RESET default_transaction_isolation")
        made.dispose()
