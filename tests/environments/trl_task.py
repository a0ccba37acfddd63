"""A task in TRL's convention: a shop with a stock, tools without state, and rewards."""

from collections.abc import Iterator
from typing import Any


class Shop:
    """A shop that sells what it has; the buyer should spend exactly the budget."""

    def __init__(self) -> None:
        self.reward = 0.0
        self._left = 0

    def reset(self, budget: int, **row: Any) -> str:
        self._left = budget
        return f" You have {budget} coins."

    def buy(self, item: str, price: int, count: int = 1) -> str:
        """
        Buy an item.

        Args:
            item: The name of the item.
            price: The price in coins.
            count: The number of items.

        Returns:
            What is left.
        """
        if price * count > self._left:
            raise ValueError("Too dear.")
        self._left -= price * count
        self.reward = 1.0 if self._left == 0 else 0.0
        return f"{item} bought, {self._left} coins left."


class Moody:
    """An environment whose reset draws from global chance."""

    resets = 0
    reward = 0.0

    def reset(self, **row: Any) -> str:
        Moody.resets += 1
        return f" Mood {Moody.resets}."


async def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def has_answer(completions: list[Any], answer: list[str], **others: Any) -> list[float]:
    """Return 1 for each completion whose last message has the answer."""
    return [float(right in said[-1]["content"]) for said, right in zip(completions, answer, strict=True)]


def is_short(completions: list[Any], **others: Any) -> list[float]:
    """Return 0.5 for each completion of at most three messages."""
    return [0.5 * (len(said) <= 3) for said in completions]


def spent(environments: list[Shop], **others: Any) -> list[float]:
    """Return the rewards of the instances, halved."""
    return [each.reward / 2 for each in environments]


def problems(split: str, seed: int) -> Iterator[dict[str, Any]]:
    first = 10 if split == "train" else 1000
    for budget in range(first, first + 5):
        yield {"prompt": [{"role": "user", "content": "Buy something."}], "budget": budget}


def products(split: str, seed: int) -> Iterator[dict[str, Any]]:
    yield {"prompt": "What is 12 times 12?", "answer": "144"}
