"""Tasks: problems and the rewards of their answers, the same in every process.

- A task is a pure function of its name, its parameters and its seed: item i is the same in every process, for ever.
- Problems of the train split, the validation split and the held-out set never meet.
- A reward is computed from text alone. A broken format is `invalid`, which is not the same as wrong.
- Built-in tasks are pure code of ours that cannot hang, so they compute rewards in the calling process. All other tasks
  are the operator's: `coordinator.tasks` reads their problems and judges in processes that can be killed.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from protocol.errors import UnknownTask
from protocol.tasks.arithmetic import Arithmetic
from protocol.tasks.interface import (
    ROLES,
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
    "ROLES",
    "BuiltIn",
    "ChatMessage",
    "Exact",
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


class BuiltIn(Task, Judging, Protocol):
    """A task that needs no files and computes its own rewards."""


BUILT_IN: Mapping[str, Callable[..., BuiltIn]] = {
    Arithmetic.name: Arithmetic,
}
"""Name → constructor, called with the seed, and with the parameters by their names."""


def task(name: str, *, seed: int = 0, parameters: Mapping[str, Any] | None = None) -> BuiltIn:
    """Return the built-in task `name`; `seed` orders its train split."""
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
    """Return a text to measure a machine with: the task's own prompt `number` if it is built in, else a sum."""
    known = name if name in BUILT_IN else Arithmetic.name
    prompt = task(known).problem(number).prompt
    return prompt if isinstance(prompt, str) else "\n".join(message.content for message in prompt)
