"""A warehouse that is asked by two tools: `price of plum?` has an answer that only the right call returns.

- The numbers belong to a day, which the policy never reads: whoever does not call, or calls for something else, cannot
  know the answer. No day is in two splits.
"""

import random
from collections.abc import Iterator
from typing import Any, Literal

from coordinator.environments.tool_schemas import schema_of
from coordinator.environments.with_tools import with_tools
from protocol.tasks import Problem

Good = Literal["apple", "pear", "plum", "melon", "fig", "lime", "kiwi", "date"]
GOODS: tuple[str, ...] = ("apple", "pear", "plum", "melon", "fig", "lime", "kiwi", "date")
TOOLS = ("price", "stock")
DAYS = {"held_out": range(200), "validation": range(200, 250), "train": range(1000, 5000)}


def known(day: int, tool: str, good: str) -> int:
    """Return what a tool says of a good on a day: three digits."""
    return random.Random(f"{day} {tool} {good}").randrange(100, 1000)


class Warehouse:
    """An episode: its day, and the last answer of the policy."""

    tools = TOOLS

    def __init__(self, problem: Problem) -> None:
        self._day, self._right = int(problem.columns["day"]), problem.answer
        self._said = ""

    def price(self, good: Good) -> int:
        """Look up today's price of a good."""
        return known(self._day, "price", good)

    def stock(self, good: Good) -> int:
        """Look up how many of a good are there today."""
        return known(self._day, "stock", good)

    def step(self, turn: str) -> None:
        """Record a turn without calls, which is the answer."""
        self._said = turn

    def reward(self) -> float:
        return float(self._said == self._right)


SCHEMAS = [schema_of(getattr(Warehouse, name)) for name in TOOLS]


def problems(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield a question for each day."""
    for day in DAYS[split]:
        chance = random.Random(f"question {day}")
        tool, good = chance.choice(TOOLS), chance.choice(GOODS)
        question = [{"role": "user", "content": f"{tool} of {good}?"}]
        asked = {"tool": tool, "good": good, "day": day}
        yield {"prompt": question, "answer": str(known(day, tool, good)), "tools": SCHEMAS} | asked


Environment = with_tools(Warehouse, turns=2)
