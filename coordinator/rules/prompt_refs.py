"""The reference of the problem that a group is about: a split and a number, or a query of the endpoint."""

from typing import Literal, NamedTuple

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
