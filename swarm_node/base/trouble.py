"""Current problem of an agent: logged once when it begins, and shown until it is over.

A wait that goes on is logged again after 1, 2, 4, … minutes, and at least once an hour.
"""

import logging

import trio

from protocol.errors import SwarmError
from protocol.text.plain import duration_text
from swarm_node.base.clock import now_ms

log = logging.getLogger(__name__)

REMINDER_S, REMINDER_MAX_S = 60.0, 3600.0
"""The first and the longest time between two lines about a wait."""


class Trouble:
    """Problem of one part of the agent."""

    def __init__(self) -> None:
        self.error: SwarmError | None = None
        """The current problem, if any."""
        self.since_ms = 0
        self._what, self._began_s = "", 0.0
        """The problem as the log calls it, and since when it does."""
        self._reminder_s = REMINDER_S
        """Duration of the problem at which it is logged again."""
        self._logged: set[str] = set()

    @property
    def lasts_s(self) -> float:
        """Seconds for which the log has called the problem as it does now; 0 without one."""
        return trio.current_time() - self._began_s if self.error else 0.0

    def record(self, error: SwarmError, what: str, *, next_try_s: float | None = None) -> None:
        """Record a problem; log a warning once per error code until it is over.

        With the time until the next try, log that, too, and that the problem lasts.
        """
        if self.error is None or what != self._what:
            self._what, self._began_s, self._reminder_s = what, trio.current_time(), REMINDER_S
        then = "" if next_try_s is None else f" Next try in {duration_text(next_try_s)}."
        if error.code not in self._logged:
            log.warning("%s code=%s: %s%s", what, error.code, error, then)
        elif then and self.lasts_s >= self._reminder_s:
            log.info("still %s after %s.%s", what, duration_text(self.lasts_s), then)
            while self._reminder_s <= self.lasts_s:
                self._reminder_s += min(self._reminder_s, REMINDER_MAX_S)
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
