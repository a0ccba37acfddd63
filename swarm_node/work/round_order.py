"""The order of an agent's rounds, if its owner wants the best paid one first: by what each pays per hour of work here.

- An hour's pay is the price of the last lease, or else the node's own, times the speed of this machine with the round's
  model. Without a speed a round comes after those that have one.
- A round that was not in the engine in this run comes first in its unit, until its first load has measured it or
  failed: otherwise a busy round would keep the others from being measured. Speeds of earlier runs do not count: cards
  and engine may have changed.
- Amounts of different units are not compared: units come in the order in which the owner's list names them first.
- Rounds that pay the same stay in the order of the owner's list.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

HOUR_S = 3600
MTOK = 1_000_000


class RoundPay(NamedTuple):
    """The pay of a round for this node."""

    unit: str
    """Name of the unit, which the round's root pins."""
    price_micros_per_mtok: int
    tokens_per_s: float = 0.0
    """The speed of this machine with the round's model; 0 if it was not measured."""
    is_new: bool = False
    """True until a version of the round was loaded in this run, or could not be."""

    @property
    def hour_micros(self) -> int | None:
        """Credit for an hour of work in micro-units; None if the speed is not known."""
        if not self.tokens_per_s:
            return None
        return int(self.price_micros_per_mtok * self.tokens_per_s * HOUR_S / MTOK)

    def to_json(self) -> dict[str, Any]:
        """Return the figures as `status` has them."""
        return {"price_micros_per_mtok": self.price_micros_per_mtok, "hour_micros": self.hour_micros}


def order_by_pay(rounds: Sequence[RoundPay]) -> tuple[int, ...]:
    """Return the places of rounds in the owner's list, the round that goes first at the beginning."""
    units = list(dict.fromkeys(pay.unit for pay in rounds))

    def key(number: int) -> tuple[int, bool, float, int]:
        pay = rounds[number]
        return units.index(pay.unit), not pay.is_new, -(pay.hour_micros or 0), number

    return tuple(sorted(range(len(rounds)), key=key))
