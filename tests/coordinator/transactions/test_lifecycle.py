"""The lives of groups and rollouts: every pair of states, on a real store, and the counts that go with them."""

import itertools

import pytest
import sqlalchemy as sa

from coordinator.rules.lifecycle import GROUP_MOVES, ROLLOUT_MOVES, UNFINISHED, GroupState, RolloutState
from coordinator.store.tables import groups, rollouts
from coordinator.transactions import leases, tally
from coordinator.transactions.rollouts import move
from tests.coordinator.world import World


def put(connection: sa.Connection, table: sa.Table, state: str) -> None:
    """Write a state past every rule, and count anew."""
    connection.execute(sa.update(table).values(state=state))
    tally.recount(connection)


@pytest.mark.parametrize(("before", "after"), list(itertools.product(GroupState, repeat=2)))
def test_a_group_moves_as_the_table_says_and_is_counted(world: World, before: GroupState, after: GroupState) -> None:
    world.offer(world.join(1))
    world.run(put, groups, before.value)
    moved = world.run(leases.set_group, 0, after)
    assert moved == (after in GROUP_MOVES[before])
    assert world.group_states() == {0: (after if moved else before).value}
    assert world.run(tally.read) == world.run(tally.counted)
    assert world.run(tally.read).unfinished == ((after if moved else before) in UNFINISHED)


@pytest.mark.parametrize(("before", "after"), list(itertools.product(RolloutState, repeat=2)))
def test_a_rollout_moves_as_the_table_says(world: World, before: RolloutState, after: RolloutState) -> None:
    world.earn(world.join(1))
    world.run(put, rollouts, before.value)
    moved = world.run(move, sa.true(), after)
    (row,) = world.rows(rollouts)
    assert [(one.claim_id, one.group_no) for one in moved] == [(row["claim_id"], 0)] * (after in ROLLOUT_MOVES[before])
    assert row["state"] == (after if moved else before)


def test_every_state_is_in_the_tables_and_can_be_reached() -> None:
    assert set(GROUP_MOVES) == set(GroupState)
    assert set(ROLLOUT_MOVES) == set(RolloutState)
    assert {after for states in GROUP_MOVES.values() for after in states} == set(GroupState)
    beside = {RolloutState.MEASURED, RolloutState.SERVED, RolloutState.SURPLUS}
    first = {RolloutState.UNSCORED, RolloutState.BUFFERED} | beside
    assert {after for states in ROLLOUT_MOVES.values() for after in states} | first == set(RolloutState)
