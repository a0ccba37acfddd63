"""Ends a process in which nothing moves any more, and shows where each of its threads stands.

- A rank that hangs leaves the others waiting for it in the middle of a step: each of them notices by itself.
- Who waits for the coordinator does not hang: it is watched only while there is something to do.
- The clock is no Python thread: it ends a process that holds the interpreter's lock for ever as well.
"""

import faulthandler
import signal
from collections.abc import Iterator
from contextlib import contextmanager

STDERR = 2


class Watchdog:
    """Ends the process after so many seconds without a move; 0 never does."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._watching = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch for the time of this block."""
        self._watching = self._seconds > 0
        self.moved()
        try:
            yield
        finally:
            self._watching = False
            faulthandler.cancel_dump_traceback_later()

    def moved(self) -> None:
        """Something was done: the time begins anew."""
        if self._watching:
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=STDERR)


def show_stacks_when_told_to_end() -> None:
    """When one rank ends, the others are told to: each leaves behind where it stood."""
    faulthandler.register(signal.SIGTERM, file=STDERR, all_threads=True, chain=True)
