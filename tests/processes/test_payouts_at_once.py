"""`payout create` and `payout settle`, typed twice in the same moment: one batch, one settlement, a word for both."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from coordinator.store.state import Database, engine
from coordinator.transactions import payouts
from ledger import store
from ledger.accounts import AccountKind
from protocol.text.money import CREDITS
from tests.coordinator.transactions.test_payouts import owe, owner, publish
from tests.coordinator.world import NOW_MS, World
from tests.ledger import postgres
from tests.processes.programs import PATIENCE_S, Swarm, script, until
from tests.processes.rounds import Coordinator

pytestmark = pytest.mark.processes

OWED = 6_000_000
SIDES = 2


class Books(World):
    """The store of a real round, with somebody to pay in it."""

    def __init__(self, where: Path | str) -> None:
        self.where, self.now_ms = where, NOW_MS
        self.database = Database(where)


@pytest.fixture(params=[pytest.param("sqlite", marks=pytest.mark.slow), "postgres"])
def round_(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Swarm, Coordinator, Path | str]]:
    if request.param == "postgres" and (reason := postgres.missing()):
        pytest.skip(reason)  # the same test runs on SQLite in any case
    with ExitStack() as held:
        url = held.enter_context(postgres.cluster(durable=False)) if request.param == "postgres" else ""
        swarm = Swarm(tmp_path / "swarm")
        held.callback(swarm.close)
        coordinator = Coordinator(swarm, {"store": {"url": url}} if url else {}).init()
        yield swarm, coordinator, url or coordinator.folder / "state.db"


def twice(swarm: Swarm, where: Path | str, *words: str) -> list[tuple[int, str]]:
    """Run a command twice at once, both starting at the same moment; return the two results."""
    made = engine(where)
    with made.connect() as holder, made.connect() as watcher:
        on_file = isinstance(where, Path)
        holder.exec_driver_sql("BEGIN IMMEDIATE" if on_file else "BEGIN")
        if not on_file:
            holder.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
            holder.exec_driver_sql("SELECT pg_advisory_xact_lock(1)")
        sides = [swarm.start(f"{words[1]}-{side}", script("swarm-coordinator"), *words) for side in range(SIDES)]
        waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        if not on_file:  # which shows nobody who waits
            until("both at the gate", lambda: watcher.exec_driver_sql(waiting).scalar() == SIDES)
        holder.exec_driver_sql("ROLLBACK")
    made.dispose()
    return sorted((side.process.wait(timeout=PATIENCE_S), side.output + side.log) for side in sides)


def test_what_is_typed_twice_at_once_pays_once(round_: tuple[Swarm, Coordinator, Path | str]) -> None:
    swarm, coordinator, where = round_
    world = Books(where)
    for key in (*owner(1, world, nodes=2), *owner(2, world)):
        owe(world, key, OWED // 3)
    publish(world)
    world.database.close()
    first, second = twice(swarm, where, "payout", "create", str(coordinator.config_file))
    assert (first[0], second[0]) == (0, 1), (first, second)
    assert f"batch 1: made, {CREDITS.exact(OWED)} to" in first[1]
    assert "payout_busy" in second[1] or "No owner with an address that counts" in second[1], second[1]
    words = ("payout", "settle", str(coordinator.config_file), "1", "--reference", "SEPA-1")
    first, second = twice(swarm, where, *words)
    assert "batch 1: done, reference SEPA-1" in first[1]
    assert second[0] == 0 or "payout_busy" in second[1], second[1]
    world = Books(where)
    (row,) = world.run(payouts.listed)
    assert (row.state, row.reference) == (payouts.BatchState.SETTLED, "SEPA-1")
    paid = {at: micros for at, micros in world.run(store.balances).items() if at.kind is AccountKind.PAID}
    assert list(paid.values()) == 3 * [OWED // 3]
    assert world.run(store.rebuild) == []
    world.database.close()
