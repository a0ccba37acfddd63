"""Episodes in this process: rows as problems, and a list of turns as the policy."""

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from protocol.tasks import ChatMessage, Problem, Reward


class Played(NamedTuple):
    """The texts read after each turn, None at the end, and the reward."""

    read: list[Any]
    earned: Any

    @property
    def score(self) -> float:
        if isinstance(self.earned, Reward):
            return self.earned.score
        return float(self.earned["score"] if isinstance(self.earned, Mapping) else self.earned)


def problems(
    module: ModuleType, split: str = "train", *, size: int = 3, seed: int = 7, **parameters: Any
) -> list[Problem]:
    """Return the problems of a kind, as they are after the round's copy was written and read."""
    return [problem_of(json.loads(json.dumps(row))) for row in module.problems(split, seed, size, **parameters)]


def problem_of(row: Mapping[str, Any]) -> Problem:
    """Return a row as a problem."""
    asked = row["prompt"]
    prompt = asked if isinstance(asked, str) else tuple(ChatMessage(each["role"], each["content"]) for each in asked)
    columns = {name: value for name, value in row.items() if name != "prompt"}
    return Problem(prompt, str(row.get("answer") or ""), columns)


def play(module: ModuleType, problem: Problem, turns: Sequence[str], /, **parameters: Any) -> Played:
    """Play the turns; stop at the end of the episode, or cut it off after the last turn."""

    async def played() -> Played:
        environment = module.Environment(problem, **parameters)
        read = list[Any]()
        for turn in turns:
            read.append(await _settled(environment.step(turn)))
            if read[-1] is None:
                break
        return Played(read, await _settled(environment.reward()))

    return asyncio.run(played())


async def _settled(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def call(name: str, **arguments: Any) -> str:
    """Return a turn with a tool call."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
