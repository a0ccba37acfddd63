"""The task of a round whose problems are the round's own copy."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from coordinator.config import Config
from coordinator.tasks import reward_exact
from coordinator.tasks.importing import needs_data
from coordinator.tasks.kinds import FOLDER, NOTE, functions_of, require_known, require_use, task_label
from coordinator.tasks.problem_file import Book
from protocol.errors import ConfigInvalid
from protocol.tasks import Problem, Reward, Task, task


class DataTask:
    """A task with the problems of a copy; each pass over the train split uses every problem once."""

    def __init__(self, name: str, folder: Path, *, seed: int, shuffle: bool) -> None:
        self._name, self._seed, self._shuffle = name, seed, shuffle
        self._books = {split: Book(folder / f"{split}.jsonl") for split in ("train", "validation", "held_out")}
        self._order = lru_cache(maxsize=2)(self._make_order)

    @property
    def name(self) -> str:
        return self._name

    def problem(self, index: int) -> Problem:
        train = self._books["train"]
        around, place = divmod(index, len(train))
        return train[int(self._order(around)[place]) if self._shuffle else place]

    def problems(self, split: Literal["validation", "held_out"]) -> Sequence[Problem]:
        return self._books[split]

    def _make_order(self, around: int) -> np.ndarray:
        return np.random.Generator(np.random.Philox(key=[self._seed, around])).permutation(len(self._books["train"]))


class ExactTask(DataTask):
    """A data task with the reward `exact`: completions are judged in this process, and by greedy decoding."""

    exact: ClassVar[Literal[True]] = True

    def reward(self, problem: Problem, completion: str) -> Reward:
        return reward_exact.reward(problem, completion)


def open_task(config: Config) -> Task:
    """Return the task of a round, built in or with the round's copy."""
    require_known(config.task.name)
    if not needs_data(config):
        return task(config.task.name, seed=config.round.seed, parameters=config.task.parameters)
    folder = config.round.directory / FOLDER
    if not (folder / NOTE).exists():
        raise ConfigInvalid(
            f"{folder} has no problems.", hint="Run `swarm-coordinator init` or `launch` to create them."
        )
    require_use(config)
    kind = ExactTask if functions_of(config) == ("exact",) else DataTask
    return kind(task_label(config), folder, seed=config.round.seed, shuffle=config.data.shuffle)


def task_here(config: Config) -> Task | None:
    """Return the task for a learner; None on another machine, which has no copy of the problems."""
    if needs_data(config) and not (config.round.directory / FOLDER / NOTE).exists():
        return None
    return open_task(config)
