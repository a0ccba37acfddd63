"""What a round pays, and how owners get it."""

from pathlib import Path

from pydantic import Field

from coordinator.config.section import Section


class MarketSection(Section):
    """What the round pays; amounts are millionths of the operator's unit."""

    budget_micros: int = Field(1_000_000_000, ge=0, description="deposited when the round is made")
    max_price_micros_per_mtok: int = Field(5_000_000, ge=0, description="dearest price accepted, per million tokens")


class PayoutsSection(Section):
    """How owners get what their nodes have earned."""

    rail: str = Field("manual", description="who moves the money: manual, evm, or module:function of a plug-in")
    minimum_micros: int = Field(1_000_000, gt=0, description="an owner who is owed less waits for the next batch")
    address_delay_h: float = Field(72.0, ge=0, description="hours until a new payout address counts")
    evm_rpc: str = Field("", description="JSON-RPC URL of a node of the chain, for rail evm")
    evm_contract: str = Field("", description="address of the payouts contract, for rail evm")
    evm_key: Path = Field(Path("evm.key"), description="file with the operator's private key in hex, for rail evm")
    evm_confirmations: int = Field(12, ge=0, description="blocks above a transaction until it is done, for rail evm")
