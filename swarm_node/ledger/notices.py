"""Warnings to the owner when the payout address changes, so that a thief cannot change it unnoticed.

- The last warning is saved in the round's folder: a change while the node was off is reported at its next start.
"""

import json
import logging
from datetime import UTC, datetime
from pathlib import Path

import trio

from protocol.errors import SwarmError
from protocol.people.owner import Earnings
from swarm_node.base.clock import now_ms
from swarm_node.base.disk import write_durably
from swarm_node.coordinator_api.client import Coordinator
from swarm_node.ledger.owner_rates import OwnerRates, owner_rates

log = logging.getLogger(__name__)

LOOK_EVERY_S = 60.0
"""Thousands of checks before a change applies; also the maximum age of the earnings shown to the owner."""


class Notices:
    """State of the owner's payout address."""

    def __init__(self, coordinator: Coordinator, folder: Path) -> None:
        self._coordinator = coordinator
        self._path = folder / "address.json"
        self.last: tuple[int, Earnings] | None = None
        """The coordinator's last answer about earnings, with its time in ms."""
        self.rates: OwnerRates | None = None
        """The coordinator's last answer about rates and payouts; None before the first, or from an older one."""

    async def run(self) -> None:
        """Check at intervals until cancelled."""
        while True:
            try:
                earnings = await self._coordinator.earnings()
                self.last = (now_ms(), earnings)
                self.announce(earnings)
                self.rates = await owner_rates(self._coordinator, earnings.owner)
            except SwarmError as error:  # the heartbeat logs the cause
                log.debug("earnings not available: %s", error)
            await trio.sleep(LOOK_EVERY_S)

    def announce(self, earnings: Earnings) -> None:
        """Log what has changed, then save it."""
        said = [earnings.address, earnings.next_address, earnings.next_from_ms]
        if self._path.exists() and json.loads(self._path.read_text()) == said:
            return
        if earnings.next_address:
            log.warning(
                "your payout address changes to %s on %s; if you did not request this, set another address before then",
                earnings.next_address,
                day(earnings.next_from_ms),
            )
        elif earnings.address:
            log.warning("your earnings are paid to %s", earnings.address)
        write_durably(self._path, json.dumps(said).encode(), temp_folder=self._path.parent)


def day(moment_ms: int) -> str:
    """Return a time as text, in UTC."""
    return f"{datetime.fromtimestamp(moment_ms / 1000, UTC):%Y-%m-%d %H:%M UTC}"
