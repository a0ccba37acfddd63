"""Tasks: problems, and what their answers earn, the same in every process.

- A task is a pure function of its name, its parameters and its seed: item i is the same in every process, for ever.
- Problems of the train split, the validation split and the held-out set never meet.
- A reward is computed from text alone. Breaking the format is `invalid`, which is not the same as wrong.
- What is built in is pure code of ours that cannot hang, so it may judge where it is called. All other tasks are the
  operator's: `coordinator.data` reads their problems, and `coordinator.rewards` judges in processes that can be killed.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from protocol.errors import UnknownTask
from protocol.tasks import environments
from protocol.tasks.arithmetic import Arithmetic
from protocol.tasks.episodes import Episodes, Game, episodes
from protocol.tasks.interface import (
    ChatMessage,
    Exact,
    Judging,
    Problem,
    Prompt,
    Reward,
    Spans,
    Split,
    Status,
    Task,
    Teaching,
)

__all__ = [
    "BUILT_IN",
    "BuiltIn",
    "ChatMessage",
    "Episodes",
    "Exact",
    "Game",
    "Judging",
    "Problem",
    "Prompt",
    "Reward",
    "Spans",
    "Split",
    "Status",
    "Task",
    "Teaching",
    "stand_in",
    "task",
]

Parameter = str | int | float | bool


class BuiltIn(Task, Judging, Protocol):
    """A task that needs no files and judges by itself."""


BUILT_IN: Mapping[str, Callable[..., BuiltIn]] = {
    Arithmetic.name: Arithmetic,
    **{name: partial(episodes, name) for name in environments.names()},
}
"""What makes each of them: called with the seed, and with the parameters by their names."""


def task(name: str, *, seed: int = 0, parameters: Mapping[str, Parameter] | None = None) -> BuiltIn:
    """The built-in task of that name; the seed orders its train split."""
    if name not in BUILT_IN:
        raise UnknownTask(f"There is no task {name!r}.", hint=f"Built in: {', '.join(sorted(BUILT_IN))}.")
    try:
        return BUILT_IN[name](seed, **(parameters or {}))
    except TypeError:
        given = ", ".join(parameters or {})
        raise UnknownTask(
            f"Task {name!r} has no such parameters: {given}.", hint="`swarm-coordinator task list` names them."
        ) from None


def stand_in(name: str, number: int) -> str:
    """A text to measure a machine with, whatever a round's task is: its own prompt, where that is built in and text."""
    known = name if name in BUILT_IN else Arithmetic.name
    prompt = task(known).problem(number).prompt
    return prompt if isinstance(prompt, str) else "\n".join(message.content for message in prompt)
