"""The problem that a group is about, as effects.

- A group of the learner's is about a problem of the train split; one of an evaluation, of another split. A group may
  also be about a query of the endpoint, which is no problem of the task.
- The problem is chosen once, when the group is made, and stored with it: it does not change with the group's leases.
"""

from typing import Literal, NamedTuple

import sqlalchemy as sa

from coordinator.store.tables import groups
from ledger.prepared import Prepared
from protocol.tasks import Problem, Split, Task

TRAIN: Literal["train"] = "train"
QUERY: Literal["query"] = "query"


class PromptRef(NamedTuple):
    """A problem of the task, or a query by its number."""

    split: Split | Literal["query"]
    number: int


def problem_of(task: Task, source: PromptRef) -> Problem:
    """Return the problem that `source` names."""
    assert source.split != QUERY, "a query is no problem"
    if source.split == TRAIN:
        return task.problem(source.number)
    return task.problems(source.split)[source.number]


# Built once: making a statement costs more than running it, and this one runs for every lease and every rollout.
_source = Prepared(
    sa.select(groups.c.split, groups.c.prompt.label("number")).where(groups.c.group_no == sa.bindparam("group")),
    PromptRef,
)


def source_of(connection: sa.Connection, group_no: int) -> PromptRef:
    """Return the reference of the problem that a group is about."""
    return _source(connection, group=group_no).single_row()
