"""A careless teacher for a task that has none of its own, as the demo's task has one (decision 18).

- The teacher knows the answer, and says something else three times in five. The right one keeps a share of the
  probability, so that groups hold both and the reward can tell them apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from bench.learning.trial import Trial
from coordinator.environments.games import chance
from coordinator.learner.warmstart import warm_start
from protocol.tasks import Problem, Task

Slip = Callable[[Problem], str]
"""The answer of somebody who does not take care."""

CARELESS_TIMES, OF = 3, 5


@dataclass(frozen=True)
class Taught:
    """A task with known answers, and what a careless teacher says to its problems."""

    task: Task
    slip: Slip

    @property
    def name(self) -> str:
        return self.task.name

    def problem(self, index: int) -> Problem:
        return self.task.problem(index)

    def problems(self, split: Literal["validation", "held_out"]) -> Sequence[Problem]:
        return self.task.problems(split)

    def demonstration(self, index: int) -> Problem:
        problem = self.problem(index)
        careless = chance.below(OF, "careless", index) < CARELESS_TIMES
        return Problem(problem.prompt, self.slip(problem)) if careless else problem

    def demonstrated(self, problem: Problem) -> frozenset[str]:
        return frozenset((problem.answer, self.slip(problem)))


def taught(trial: Trial, slip: Slip) -> None:
    """Have the policy of a trial imitate such a teacher."""
    warm_start(trial.crew.policy.model, Taught(trial.task, slip), trial.text.encode, trial.end, lambda *_: None)
    trial.publish()


def spells_carelessly(problem: Problem) -> str:
    """The word as it was given, where it should be spelled backward."""
    return problem.answer[::-1]
