"""The tally: its numbers equal a fresh count, whatever happens between two changes."""

import pytest
import sqlalchemy as sa

from coordinator.store import tables
from coordinator.transactions import tally
from coordinator.transactions.tally import Tally
from tests.coordinator.world import MAX_COST, World, answer


def test_each_step_of_a_lease_is_counted(world: World) -> None:
    key = world.join(1)
    first, second = world.offer(key, groups=2).leases
    assert world.run(tally.read) == Tally(2, 2 * MAX_COST)
    world.give_back(key, second)
    assert world.run(tally.read) == Tally(1, MAX_COST)
    world.submit(key, answer(key, first))
    assert world.run(tally.read) == Tally(1, 0), "it waits for the learner"
    world.earn(key)
    world.train(1)
    assert world.run(tally.read) == Tally(0, 0)


def test_a_tally_that_is_missing_is_counted_when_it_is_first_asked_for_or_changed(world: World) -> None:
    key = world.join(1)
    world.lease(key)
    world.run(lambda connection: connection.execute(sa.delete(tables.tally)))
    assert world.run(tally.read) == Tally(1, MAX_COST)
    world.run(lambda connection: connection.execute(sa.delete(tables.tally)))
    world.lease(key)
    assert world.run(tally.read) == Tally(2, 2 * MAX_COST)


def test_an_effect_that_fails_leaves_the_tally_as_it_was(world: World) -> None:
    key = world.join(1)
    lease = world.lease(key)

    def fail(connection: sa.Connection) -> None:
        tally.change(connection, groups=5, micros=7)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        world.run(fail)
    assert world.run(tally.read) == Tally(1, lease.samples * world.terms.max_new_tokens)


def test_a_group_is_counted_once_however_often_it_is_set(world: World) -> None:
    key = world.join(1)
    first = world.lease(key)
    world.now_ms += 2 * world.terms.timeout_ms
    world.expire()
    world.expire()
    assert world.run(tally.read) == Tally(0, 0)
    assert world.lease(key).prompt == first.prompt
    assert world.run(tally.read) == world.run(tally.counted) == Tally(1, MAX_COST)
