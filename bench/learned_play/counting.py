"""A taskset of verifiers: a user counts on from a digit, `7 up`, then `down twice`, then `up`.

- Each answer is a digit, modulo ten; only a whole conversation without a mistake is rewarded.
- No task occurs twice, so those that are held out were never seen.
"""

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import verifiers.v1 as vf

__all__ = ["CountingEnv", "CountingTaskset"]

STEPS = {"up": 1, "down": -1, "up twice": 2, "down twice": -2}
TURNS = 3


class CountingData(vf.TaskData):  # type: ignore[misc]  # verifiers is not where types are checked
    """The steps of a conversation, and the right answer to each."""

    steps: list[str]
    answers: list[str]


class CountingTask(vf.Task[CountingData, vf.State, vf.TaskConfig]):  # type: ignore[misc]  # as above
    """A conversation, which is solved if all answers are right."""

    @vf.reward(weight=1.0)  # type: ignore[untyped-decorator]  # as above
    async def right(self, trace: Any) -> float:
        return float([message.content for message in trace.assistant_messages] == self.data.answers)


class CountingTaskset(vf.Taskset[CountingTask, vf.TasksetConfig]):  # type: ignore[misc]  # as above
    """All conversations, in an order of their own."""

    def load(self) -> Iterator[CountingTask]:
        every = list(product(range(10), product(STEPS, repeat=TURNS)))
        for first, steps in random.Random(0).sample(every, len(every)):
            sums = [first + sum(STEPS[step] for step in steps[: place + 1]) for place in range(TURNS)]
            answers = [str(each % 10) for each in sums]
            yield CountingTask(CountingData(prompt=f"{first}\n{steps[0]}", steps=list(steps), answers=answers))


class CountingEnvConfig(vf.EnvConfig):  # type: ignore[misc]  # as above
    """The seat of the policy."""

    agent: vf.AgentConfig = vf.AgentConfig()


class CountingEnv(vf.Env[CountingEnvConfig]):  # type: ignore[misc]  # as above
    """The user, who says the next step after each answer."""

    async def run(self, task: Any, agents: Any) -> None:
        async with agents.agent.interaction(task) as talk:
            segment = await talk.turn(None)
            for step in task.data.steps[1:]:
                if segment.terminated:
                    break
                segment = await talk.turn(step)
