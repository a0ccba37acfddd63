"""What stands in an agent's way: told of when it begins, not each time that it is met, and shown until it is over."""

import logging

from protocol.errors import SwarmError
from swarm_node.base.clock import now_ms

log = logging.getLogger(__name__)


class Trouble:
    """Of one part of the agent."""

    def __init__(self) -> None:
        self.error: SwarmError | None = None
        """What stands in the way now."""
        self.since_ms = 0
        self._told: set[str] = set()

    def met(self, error: SwarmError, what: str) -> None:
        """It goes on; a warning for each kind, once until it is over."""
        if error.code not in self._told:
            log.warning("%s code=%s: %s", what, error.code, error)
        self.show(error)

    def show(self, error: SwarmError) -> None:
        """The same where somebody else tells of it."""
        self.since_ms = self.since_ms if self.error else now_ms()
        self.error = error
        self._told.add(error.code)

    def over(self, said: str = "") -> None:
        """Nothing stands in the way."""
        if self.error and said:
            log.info("%s", said)
        self.error = None
        self._told.clear()
