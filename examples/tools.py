"""Shopping with two tools: `What do 3 pears cost?` wants a look at the price, a multiplication, and the sum alone."""

import random
from typing import Literal

from coordinator.environments.tool_schemas import schema_of
from coordinator.environments.with_tools import tool_environment

PRICES = {"apple": 4, "pear": 7, "plum": 12, "melon": 35, "fig": 18, "lime": 9}
BASKETS = [(count, fruit) for count in range(2, 30) for fruit in PRICES]
SPLITS = {"held_out": slice(0, 24), "validation": slice(24, 32), "train": slice(32, None)}


def price(fruit: Literal["apple", "pear", "plum", "melon", "fig", "lime"]) -> int:
    """Look up the price of one fruit."""
    return PRICES[fruit]


def calculate(a: int, operation: Literal["+", "-", "*"], b: int) -> int:
    """Calculate with two numbers."""
    return {"+": a + b, "-": a - b, "*": a * b}[operation]


tools = [price, calculate]


def problems(split, seed):
    """Yield questions; no question is in two splits."""
    for count, fruit in random.Random(0).sample(BASKETS, len(BASKETS))[SPLITS[split]]:
        question = [{"role": "user", "content": f"What do {count} {fruit}s cost? End with the number alone."}]
        schemas = [schema_of(tool) for tool in tools]
        yield {"prompt": question, "answer": str(count * PRICES[fruit]), "tools": schemas}


def reward(problem, completion, messages):
    """Give 1 for the number alone, and less for what leads there: a right number in a text, and calls that worked."""
    if completion.strip() == problem.answer:
        return 1.0
    results = [message["content"] for message in messages if message["role"] == "tool"]
    worked = {result for result in results if not result.startswith("Error")}
    return 0.1 * min(len(worked), 2) + 0.3 * (problem.answer in completion.split()) + 0.2 * (problem.answer in worked)


Environment = tool_environment(tools, reward, turns=4)
