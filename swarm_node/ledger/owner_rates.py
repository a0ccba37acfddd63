"""Rates and payouts of an owner, as the coordinator reports them: public figures, which it does not sign.

- They are shown, and nothing is decided by them. What was credited and paid is proved by the ledger (`ledger receipts`,
  `ledger payouts`).
- An answer of another form, or none, means that the figures are not known; it is no error.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from protocol.errors import SwarmError
from protocol.text.money import EarningPace
from swarm_node.coordinator_api.client import Coordinator

AMOUNT_MAX = 2**62


class OwnerRates(NamedTuple):
    """Rates by node, and what the owner was paid."""

    nodes: Mapping[str, EarningPace]
    total: EarningPace
    paid_micros: int
    under_way_micros: int
    payouts: int
    last_ms: int | None
    """Time of the last payout; None before the first."""
    next_ms: int | None
    """Time at which the next batch is due; None without a schedule."""
    minimum_micros: int

    def to_json(self, node_id: str = "") -> dict[str, Any]:
        """Return the figures as plain values, with the rate of one node or of all."""
        pace = self.nodes.get(node_id, EarningPace()) if node_id else self.total
        return {"rate": pace._asdict(), **dict(list(self._asdict().items())[2:])}


async def owner_rates(coordinator: Coordinator, owner: str) -> OwnerRates | None:
    """Request an owner's rates and payouts; None if the coordinator does not report them."""
    try:
        return parse_rates(await coordinator.rates(owner))
    except SwarmError:
        return None


def parse_rates(answer: Mapping[str, Any]) -> OwnerRates | None:
    """Parse an unsigned answer; None if it is of another form."""
    try:
        paces = {str(row["node_id"]): EarningPace.parse(row) for row in answer["nodes"]}
        total, paid, payouts = EarningPace.parse(answer["total"]), answer["paid"], answer["payouts"]
        if total is None:
            return None
        return OwnerRates(
            {node: pace for node, pace in paces.items() if pace is not None},
            total,
            _number(paid["paid_micros"]),
            _number(paid["under_way_micros"]),
            _number(paid["payouts"]),
            _moment(paid["last_ms"]),
            _moment(payouts["next_ms"]),
            _number(payouts["minimum_micros"]),
        )
    except (LookupError, TypeError, ValueError):
        return None


def _number(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value <= AMOUNT_MAX:
        raise ValueError
    return value


def _moment(value: object) -> int | None:
    return None if value is None else _number(value)
