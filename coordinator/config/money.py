"""Settings of the budget, prices and payouts, and the units in which each payout rail can pay.

- A rail pays in a currency, so the round's unit must be one, by its ISO 4217 code. € and £ are accepted; $ and ¥ are
  signs of several currencies.
- Rail lightning pays in BTC, mBTC, sat or msat. ₿ is refused: it stands for a bitcoin or for a satoshi.
- A payment is rounded down to the rail's smallest one; the rest stays payable.
"""

from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field

from coordinator.config.section import Section
from ledger.entry import with_bonus
from protocol import limits


class MarketSection(Section):
    """Budget and maximum price, in millionths of the round's unit."""

    budget_micros: int = Field(1_000_000_000, ge=0, description="budget that `init` deposits in the ledger")
    max_price_micros_per_mtok: int = Field(5_000_000, ge=0, description="maximum price you pay per million tokens")
    exact_bonus: float = Field(
        0.0,
        ge=0,
        le=limits.EXACT_BONUS_MAX,
        description="addition to a node's price once the round's auditor repeats its work to the bit, as a share of it",
    )
    context_share: float = Field(
        0.02,
        ge=0,
        le=1,
        description="payment for each token of a prompt or an earlier turn that a lease has a node compute, as a share "
        "of the price of a sampled token",
    )

    @property
    def dearest_micros_per_mtok(self) -> int:
        """Return the maximum price with the bonus of an exact class, which is what a token can cost."""
        return with_bonus(self.max_price_micros_per_mtok, self.exact_bonus)


class PayoutsSection(Section):
    """Payouts to the owners of nodes."""

    rail: str = Field(
        "manual",
        description="payment method: manual, sepa, paypal, stripe, lightning, evm, or module:function of a plug-in",
    )
    minimum_micros: int = Field(1_000_000, gt=0, description="minimum payout; smaller balances wait for a later batch")
    every_d: float = Field(
        0.0, ge=0, le=366, description="days between two batches, announced to owners; 0: no schedule is announced"
    )
    address_delay_h: float = Field(72.0, ge=0, description="hours before a new payout address becomes active")
    evm_rpc: str = Field("", description="JSON-RPC URL of a node of the chain, for rail evm")
    evm_contract: str = Field("", description="address of the payouts contract, for rail evm")
    evm_key: Path = Field(Path("evm.key"), description="file with the operator's private key in hex, for rail evm")
    evm_confirmations: int = Field(
        12, ge=0, description="confirmations (blocks) before a payment is final, for rail evm"
    )
    sepa_name: str = Field("", description="name of your account's holder, for rail sepa")
    sepa_iban: str = Field("", description="IBAN of your account, without spaces, for rail sepa")
    paypal_decimal: Literal[".", ","] = Field(
        ".", description="decimal sign of amounts in the file of rail paypal: the one of your PayPal account's country"
    )


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
