"""Tells the owner when the payout address changes, as soon as the coordinator knows: a thief cannot do it quietly.

- What was told is remembered in the round's folder: a change while the node was away is told at its next start.
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

log = logging.getLogger(__name__)

LOOK_EVERY_S = 60.0
"""Thousands of times before a change counts; and what is pending is shown to the owner no older than this."""


class Notices:
    """What this node knows of its owner's address."""

    def __init__(self, coordinator: Coordinator, folder: Path) -> None:
        self._coordinator = coordinator
        self._path = folder / "address.json"
        self.last: tuple[int, Earnings] | None = None
        """What the coordinator last said of earnings, and when."""

    async def run(self) -> None:
        """Look for ever."""
        while True:
            try:
                earnings = await self._coordinator.earnings()
                self.last = (now_ms(), earnings)
                self.announce(earnings)
            except SwarmError as error:  # the heartbeat tells what is wrong
                log.debug("earnings not available: %s", error)
            await trio.sleep(LOOK_EVERY_S)

    def announce(self, earnings: Earnings) -> None:
        """Tell what is new, then remember it."""
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
    """A moment as people write it."""
    return f"{datetime.fromtimestamp(moment_ms / 1000, UTC):%Y-%m-%d %H:%M UTC}"
