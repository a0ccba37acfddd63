"""The form of what is measured: a cell of honest nodes and attackers, and what it came to."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

Kind = Literal["fixed-120", "new-2", "new-20"]
Addresses = Literal["one", "many"]

KINDS: dict[Kind, tuple[int, float]] = {"fixed-120": (120, 0.0), "new-2": (0, 2.0), "new-20": (0, 20.0)}
"""Keys that are there from the start, and keys that are added each second."""

HONEST = (1, 4, 16)
ADDRESSES: tuple[Addresses, ...] = ("one", "many")


@dataclass(frozen=True)
class Cell:
    """A number of honest nodes, and attackers of one kind at one address or at many."""

    honest: int
    kind: Kind
    addresses: Addresses

    @property
    def name(self) -> str:
        return f"{self.honest} honest, {self.kind} keys, {self.addresses} address{'es' * (self.addresses == 'many')}"


@dataclass(frozen=True)
class Row:
    """A cell: the figure without attackers, with them, and the bound of their ratio."""

    case: str
    undisturbed: float
    attacked: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None


def cells(honest: list[int], kinds: list[Kind], addresses: list[Addresses]) -> Iterator[Cell]:
    """Every combination."""
    for cell in product(honest, kinds, addresses):
        yield Cell(*cell)
