"""A watchdog that ends a process without progress, and prints the stack of each of its threads.

- If a rank hangs, the others wait for it in the middle of a step: the watchdog of each of them ends it.
- Waiting for the coordinator is no hang: a process is watched only while it has work.
- A replay reports progress after every module that computed something, however slow it is. A step that reports none,
  such as loading a model, sets its own time limit.
- One thread is watched: progress on another one does not count, and does not start the timer.
- The timer is not a Python thread: it also ends a process that holds the interpreter's lock forever.
"""

import faulthandler
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

STDERR = 2

PAUSE_S = 1.0
"""The shortest interval between two resets of the timer, as each reset costs a thread."""


class Watchdog:
    """A timer that ends the process after `seconds` without progress; 0 turns it off."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._watching = False
        self._thread = 0
        self._set_again_s = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch this thread in this block."""
        self._watching, self._thread = self._seconds > 0, get_ident()
        self._set_again_s = 0.0
        self.moved()
        try:
            yield
        finally:
            self._watching = False
            faulthandler.cancel_dump_traceback_later()

    def moved(self, within_s: float = 0.0) -> None:
        """Reset the timer, since there was progress; `within_s` is the limit of the next step, if that is longer."""
        now_s = time.monotonic()
        if not self._watching or get_ident() != self._thread:
            return
        if now_s < self._set_again_s and not within_s:
            return
        self._set_again_s = 0.0 if within_s else now_s + min(PAUSE_S, self._seconds / 10)
        faulthandler.dump_traceback_later(max(self._seconds, within_s), exit=True, file=STDERR)


def show_stacks_when_told_to_end() -> None:
    """Print the stacks of all threads at SIGTERM, which a rank gets when another one has ended."""
    faulthandler.register(signal.SIGTERM, file=STDERR, all_threads=True, chain=True)
