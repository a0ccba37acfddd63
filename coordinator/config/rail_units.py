"""The units that each payout rail can pay, and its smallest payment in them.

- A rail pays in a currency, so the round's unit must be one, by its ISO 4217 code. € and £ are accepted; $ and ¥ are
  signs of several currencies.
- Rail lightning pays in BTC, mBTC, sat or msat. ₿ is refused: it stands for a bitcoin or for a satoshi.
- A payment is rounded down to the rail's smallest one; the rest stays payable.
"""

from typing import NamedTuple

BY_HAND = ("manual", "sepa", "paypal", "stripe", "lightning")
"""Rails whose batches a person pays, who then gives the reference."""

_SIGNS = {"€": "EUR", "£": "GBP"}
_WITH_CENTS = "AUD BRL CAD CHF CZK DKK EUR GBP HKD MXN NOK NZD PLN SEK SGD THB USD"
_CENT, _WHOLE = 10_000, 1_000_000


class RailUnit(NamedTuple):
    """A unit as a rail pays it."""

    code: str
    """The currency as the rail's file names it."""
    step_micros: int
    """The smallest payment, in millionths of the round's unit; every payment is a multiple of it."""


_UNITS: dict[str, dict[str, int]] = {
    "sepa": {"EUR": _CENT},
    "paypal": dict.fromkeys([*_WITH_CENTS.split(), "ILS", "PHP"], _CENT) | dict.fromkeys(("HUF", "JPY", "TWD"), _WHOLE),
    "stripe": dict.fromkeys([*_WITH_CENTS.split(), "RON", "ZAR"], _CENT) | {"JPY": _WHOLE},
    "lightning": {"BTC": 1, "MBTC": 1, "SAT": 1_000, "SATS": 1_000, "MSAT": _WHOLE},
}
"""The smallest payment of each rail in each unit that it pays."""

MSAT_PER_UNIT = {"BTC": 100_000_000_000, "MBTC": 100_000_000, "SAT": 1_000, "SATS": 1_000, "MSAT": 1}
"""Thousandths of a satoshi in each of rail lightning's units."""


def find_rail_unit(rail: str, unit: str) -> RailUnit | None:
    """Return how a rail pays a unit; None if it cannot. Rails without a list pay every unit, to the micro-unit."""
    if rail not in _UNITS:
        return RailUnit(unit, 1)
    code = _SIGNS.get(unit, unit.upper())
    step = _UNITS[rail].get(code)
    return None if step is None else RailUnit(code, step)


def payable_units(rail: str) -> str:
    """Return the units that a rail pays, for a message."""
    names = {"MBTC": "mBTC", "SAT": "sat", "SATS": "sats", "MSAT": "msat"}
    return ", ".join(names.get(code, code) for code in _UNITS[rail])
