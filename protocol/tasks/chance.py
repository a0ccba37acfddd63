"""Chance for environments: what a name stands for, the same in every process, for ever.

- Nothing here keeps a state: each draw has a name of its own, such as `("leduc", seed, "deal", 3)`.
- Only integers are drawn. A float that is rounded otherwise on another machine would make another game.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import TypeVar

T = TypeVar("T")


def word(*name: object) -> int:
    """The number below 2^64 that a name stands for."""
    return int.from_bytes(blake2b("/".join(map(str, name)).encode(), digest_size=8).digest())


def below(count: int, *name: object) -> int:
    """One of so many; the bias is below count / 2^64."""
    return word(*name) * count >> 64


def shuffled(items: Sequence[T], *name: object) -> list[T]:
    """The items in the order that a name stands for."""
    mixed = list(items)
    for last in range(len(mixed) - 1, 0, -1):
        other = below(last + 1, *name, last)
        mixed[last], mixed[other] = mixed[other], mixed[last]
    return mixed


def weighted(weights: Sequence[int], *name: object) -> int:
    """A place, as often as its weight says; the weights must not all be zero."""
    target = below(sum(weights), *name)
    for place, weight in enumerate(weights):
        target -= weight
        if target < 0:
            return place
    raise ValueError("weights are negative")
