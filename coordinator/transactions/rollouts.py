"""Moves of accepted rollouts from state to state; `coordinator.rules.lifecycle` lists them."""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from coordinator.rules.lifecycle import RolloutState, rollouts_before
from coordinator.store.tables import rollouts


def move(connection: sa.Connection, which: sa.ColumnElement[bool], to: RolloutState, **values: Any) -> Sequence[Any]:
    """Move those rollouts of `which` that may move, set other columns, and return their claim ids and group numbers."""
    may = rollouts.c.state.in_(rollouts_before(to))
    moved = sa.update(rollouts).where(which, may).values(state=to.value, **values)
    return connection.execute(moved.returning(rollouts.c.claim_id, rollouts.c.group_no)).all()
