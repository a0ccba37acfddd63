"""Current problem of an agent: logged once when it begins, and shown until it is over."""

import logging

from protocol.errors import SwarmError
from swarm_node.base.clock import now_ms

log = logging.getLogger(__name__)


class Trouble:
    """Problem of one part of the agent."""

    def __init__(self) -> None:
        self.error: SwarmError | None = None
        """The current problem, if any."""
        self.since_ms = 0
        self._logged: set[str] = set()

    def record(self, error: SwarmError, what: str) -> None:
        """Record a problem; log a warning once per error code until it is over."""
        if error.code not in self._logged:
            log.warning("%s code=%s: %s", what, error.code, error)
        self.show(error)

    def show(self, error: SwarmError) -> None:
        """Record a problem that the caller has logged already."""
        self.since_ms = self.since_ms if self.error else now_ms()
        self.error = error
        self._logged.add(error.code)

    def clear(self, said: str = "") -> None:
        """Record that the problem is over."""
        if self.error and said:
            log.info("%s", said)
        self.error = None
        self._logged.clear()
