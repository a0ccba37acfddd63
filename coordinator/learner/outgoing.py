"""A version on its way out, on a thread beside the next update: one at a time.

    read     the canary is scored, and the checkpoint and the version's files are written: weights and moments must not
             change meanwhile
    send     the version is uploaded and published: nothing but its files is needed

- Nothing is copied. Weights and moments change in an optimizer step alone, and whoever makes one waits until they are
  read (`wait_until_read`); the forward and backward passes before it go on beside the reading.
- The steps on the thread keep their order, so a kill finds on the disk what it would find if the loop waited for each.
- An error on the thread is raised in the loop: while it waits for a batch (`check`), before weights change, and before
  the next version goes out.
- When the loop ends by an error, it waits for the thread for some seconds only: the process may end at any step.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

Job = Callable[[], None]

ABANDON_S = 10.0
"""Time that a failed loop gives the thread to end. To end in the middle of a write is safe."""


class Outgoing:
    """The thread, if there is one, and how long the loop has waited for it."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._was_read = Event()
        self._error: BaseException | None = None
        self.waited_s = 0.0
        """Seconds that the loop stood still for versions, in all."""

    def start(self, read: Job, send: Job) -> None:
        """Begin with the next version, once the one before it is out."""
        self.finish()
        self._was_read.clear()
        self._thread = Thread(target=self._run, args=(read, send), name="outgoing", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what went wrong on the thread."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait_until_read(self) -> None:
        """Wait until nothing reads the weights any more: they may change."""
        if self._thread is not None:
            with self.standing_still():
                self._was_read.wait()
        self.check()

    def finish(self) -> None:
        """Wait until the version is out."""
        if self._thread is not None:
            with self.standing_still():
                self._thread.join()
            self._thread = None
        self.check()

    def abandon(self) -> None:
        """Give the thread a moment to end; no later."""
        if self._thread is not None:
            self._thread.join(ABANDON_S)

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Count the time of this block: the loop does nothing else for the sake of a version."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.waited_s += time.monotonic() - began

    def _run(self, read: Job, send: Job) -> None:
        try:
            read()
            self._was_read.set()
            send()
        except BaseException as error:  # raised in the loop
            self._error = error
        finally:
            self._was_read.set()
