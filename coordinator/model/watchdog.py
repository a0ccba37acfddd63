"""Ends a process in which nothing moves any more, and shows where each of its threads stands.

- A rank that hangs leaves the others waiting for it in the middle of a step: each of them notices by itself.
- Who waits for the coordinator does not hang: it is watched only while there is something to do.
- A replay reports after every module that computed something: however slow it is, it moves. A step that reports nothing
  on its way, as the loading of a model, says how long it may take.
- One thread is watched: what moves on another does not count, and sets no clock that nobody would stop.
- The clock is no Python thread: it ends a process that holds the interpreter's lock for ever as well.
"""

import faulthandler
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

STDERR = 2

PAUSE_S = 1.0
"""The clock is set anew this often at most, whatever moves: that costs a thread."""


class Watchdog:
    """Ends the process after so many seconds without a move; 0 never does."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._watching = False
        self._thread = 0
        self._set_again_s = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch for the time of this block."""
        self._watching, self._thread = self._seconds > 0, get_ident()
        self._set_again_s = 0.0
        self.moved()
        try:
            yield
        finally:
            self._watching = False
            faulthandler.cancel_dump_traceback_later()

    def moved(self, within_s: float = 0.0) -> None:
        """Begin the time anew, since something was done; or give the next step as long as this, if that is longer."""
        now_s = time.monotonic()
        if not self._watching or get_ident() != self._thread:
            return
        if now_s < self._set_again_s and not within_s:
            return
        self._set_again_s = 0.0 if within_s else now_s + min(PAUSE_S, self._seconds / 10)
        faulthandler.dump_traceback_later(max(self._seconds, within_s), exit=True, file=STDERR)


def show_stacks_when_told_to_end() -> None:
    """When one rank ends, the others are told to: each leaves behind where it stood."""
    faulthandler.register(signal.SIGTERM, file=STDERR, all_threads=True, chain=True)
