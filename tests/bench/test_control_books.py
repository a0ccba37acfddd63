"""The checks of a store after a load: nothing is wrong with a sound one, and each lie is found by its own check."""

from collections.abc import Callable, Iterator
from copy import deepcopy

import pytest
import sqlalchemy as sa

from bench.control.books import CHECKS, Heard, examine
from coordinator.store.tables import audits, leases, rollouts, tally
from ledger.tables import balances_table, entries_table
from tests.coordinator.world import World, answer

LEASES, CREDITS, STATES, COUNTS, MONEY, TRAINED = CHECKS
Lie = Callable[[sa.Connection, Heard], object]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, Heard]]:
    """Four groups in two batches, a lease that is open, and two that were skipped and rejected."""
    world, heard = World(tmp_path_factory.mktemp("round"), staleness=9), Heard(groups_per_update=2)
    world.publish(1, 0)
    for number in range(1, 5):
        key = world.join(number)
        lease = world.lease(key)
        heard.leases.append((key.node_id, lease.lease_id))
        heard.verdicts += [world.submit(key, answer(key, lease)) for _ in range(2)]
    heard.trained = [group.claim_id for number in (1, 2) for group in world.train(number).groups]
    key = world.join(5)
    given = [world.lease(key) for _ in range(3)]
    heard.leases += [(key.node_id, lease.lease_id) for lease in given]
    world.give_back(key, given[0])
    heard.verdicts.append(world.submit(key, answer(key, given[1].model_copy(update={"seed": 99}))))
    yield world, heard
    world.database.close()


def test_nothing_is_wrong_with_a_sound_store(loaded: tuple[World, Heard]) -> None:
    world, heard = loaded
    assert [verdict.outcome for verdict in heard.verdicts[-3:]] == ["accepted", "already_accepted", "rejected"]
    assert world.run(examine, heard) == {name: [] for name in CHECKS}


class Found(Exception):
    """A finding: what was wrong; being raised, it undoes the lie."""

    def __init__(self, wrong: dict[str, list[str]]) -> None:
        super().__init__(wrong)
        self.wrong = wrong


def first(connection: sa.Connection, column: sa.Column[str]) -> str:
    found: str = connection.execute(sa.select(column).order_by(column).limit(1)).scalar_one()
    return found


def change(table: sa.Table, **values: object) -> Lie:
    """The first row of a table becomes another."""
    key = next(iter(table.primary_key))
    return lambda connection, _: connection.execute(
        sa.update(table).where(key == first(connection, key)).values(**values)
    )


def double_entry(connection: sa.Connection, _heard: Heard) -> None:
    """The credit of a claim that was never accepted, for a lease that was credited before."""
    row = connection.execute(sa.select(entries_table).where(entries_table.c.kind == "pending").limit(1)).one()
    other = {"index": 1_000, "content_hash": "f" * 64, "effect": "pending:other"}
    connection.execute(sa.insert(entries_table).values({**row._asdict(), **other}))


def forgotten(connection: sa.Connection, heard: Heard) -> None:
    """Groups that no batch ever had."""
    heard.trained.clear()
    connection.execute(sa.update(rollouts).values(state="buffered"))


LIES: dict[str, tuple[str, Lie]] = {
    "a lease heard by two nodes": (LEASES, lambda _, heard: heard.leases.append(("other", heard.leases[0][1]))),
    "a lease that the store does not know": (LEASES, lambda _, heard: heard.leases.append(("node", "unknown"))),
    "two leases of one group": (LEASES, change(leases, group_no=1)),
    "a credit that was entered twice": (CREDITS, double_entry),
    "a rollout worth more than was entered": (CREDITS, change(rollouts, credit_micros=1_000)),
    "a claim that no audit could ever be drawn for": (CREDITS, lambda c, _: c.execute(sa.delete(audits))),
    "two first acceptances of one lease": (CREDITS, lambda _, heard: heard.verdicts.append(heard.verdicts[0])),
    "an ended lease without an end": (STATES, change(leases, ended_ms=None)),
    "an answered lease that expired": (STATES, change(leases, state="expired")),
    "a state that nobody declared": (STATES, change(leases, state="lost")),
    "a group too many in the tally": (COUNTS, change(tally, unfinished=tally.c.unfinished + 1)),
    "money reserved for nothing": (COUNTS, change(tally, reserved_micros=tally.c.reserved_micros + 1)),
    "a balance that is not in the log": (MONEY, change(balances_table, micros=balances_table.c.micros + 1)),
    "a group that came in two batches": (TRAINED, lambda _, heard: heard.trained.append(heard.trained[0])),
    "a batch that never came": (TRAINED, lambda _, heard: heard.trained.pop()),
    "a group that was thrown away": (TRAINED, change(rollouts, state="stale")),
    "a batch's worth that waits for ever": (TRAINED, forgotten),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_found(loaded: tuple[World, Heard], name: str) -> None:
    world, heard = loaded[0], deepcopy(loaded[1])
    check, lie = LIES[name]

    def lied(connection: sa.Connection) -> None:
        lie(connection, heard)
        raise Found(examine(connection, heard))

    with pytest.raises(Found) as found:
        world.run(lied)
    assert found.value.wrong[check]
