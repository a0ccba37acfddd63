"""Settings of the budget, prices and payouts."""

from pathlib import Path
from typing import Literal

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
