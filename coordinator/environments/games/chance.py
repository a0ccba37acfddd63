"""Random numbers for environments: a function of a name, the same in every process, for ever.

- There is no state: each draw has a name of its own, such as `("leduc", seed, "deal", 3)`.
- Only integers are drawn. A float that is rounded differently on another machine would give another game.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import TypeVar

T = TypeVar("T")


def word(*name: object) -> int:
    """Return the number below 2^64 that follows from a name."""
    return int.from_bytes(blake2b("/".join(map(str, name)).encode(), digest_size=8).digest())


def below(count: int, *name: object) -> int:
    """Return a number below `count`; the bias is below count / 2^64."""
    return word(*name) * count >> 64


def shuffled(items: Sequence[T], *name: object) -> list[T]:
    """Return the items in an order that follows from a name."""
    mixed = list(items)
    for last in range(len(mixed) - 1, 0, -1):
        other = below(last + 1, *name, last)
        mixed[last], mixed[other] = mixed[other], mixed[last]
    return mixed


def weighted(weights: Sequence[int], *name: object) -> int:
    """Return an index, drawn in proportion to its weight; the weights must not all be zero."""
    target = below(sum(weights), *name)
    for place, weight in enumerate(weights):
        target -= weight
        if target < 0:
            return place
    raise ValueError("weights are negative")
