"""Deterministic environments: prompts, their answers and the reward, the same on both sides of the wire.

- A task is a pure function of its name and its seed: item i is the same in every process, for ever.
- Prompts of the train split, the validation split and the held-out set never meet.
- A reward is computed from text alone. Breaking the format is `invalid`, which is not the same as wrong.
"""

from protocol.errors import UnknownTask
from protocol.tasks.arithmetic import Arithmetic
from protocol.tasks.interface import Reward, Task

__all__ = ["Reward", "Task", "task"]

_TASKS = {Arithmetic.name: Arithmetic}


def task(name: str, *, seed: int = 0) -> Task:
    """The built-in task of that name; the seed orders its train split."""
    if name not in _TASKS:
        raise UnknownTask(f"There is no task {name!r}.", hint=f"Built in: {', '.join(sorted(_TASKS))}.")
    return _TASKS[name](seed)
