"""Moves of accepted rollouts from state to state; `coordinator.rules.lifecycle` lists them."""

from typing import Any, NamedTuple

import sqlalchemy as sa

from coordinator.rules.lifecycle import RolloutState, rollouts_before
from coordinator.store.rows import read_rows
from coordinator.store.tables import rollouts


class MovedRollout(NamedTuple):
    """A rollout that has another state now."""

    claim_id: str
    group_no: int


def move(
    connection: sa.Connection, which: sa.ColumnElement[bool], to: RolloutState, **values: Any
) -> list[MovedRollout]:
    """Move those rollouts of `which` that may move, set other columns, and return them."""
    may = rollouts.c.state.in_(rollouts_before(to))
    moved = sa.update(rollouts).where(which, may).values(state=to.value, **values)
    return read_rows(connection, moved.returning(rollouts.c.claim_id, rollouts.c.group_no), MovedRollout)
