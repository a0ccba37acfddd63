"""Saving and publishing of a version on a thread, in parallel with the next update: one version at a time.

    read     the canary is scored, and the checkpoint and the version's files are written: weights and moments must not
             change meanwhile
    send     the checkpoint is synced and named, then the version is uploaded and published: only files are needed

- No copy is made in the process. The system takes written bytes into its cache as fast as memory, up to its limit for
  unsynced bytes (on Linux 15 % of the free memory); beyond that, writing is as slow as the disk.
- Weights and moments change only in an optimizer step, which waits until they are read (`wait_until_read`); the forward
  and backward passes before it run in parallel with the reading.
- The thread keeps the order of its steps: a version is never published before its checkpoint is durable.
- An error on the thread is raised in the loop: while it waits for a batch (`check`), before weights change, and before
  the next version is started.
- When the loop ends by an error, it waits for the thread for some seconds only: the process may end at any step.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

Job = Callable[[], None]

ABANDON_S = 10.0
"""The time that a failed loop waits for the thread to end. Ending in the middle of a write is safe."""


class Outgoing:
    """The thread that publishes a version, if it runs, and the total wait of the loop for it."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._was_read = Event()
        self._error: BaseException | None = None
        self.waited_s = 0.0
        """Total seconds that the loop waited for versions."""

    def start(self, read: Job, send: Job) -> None:
        """Start publishing the next version, once the one before it is published."""
        self.finish()
        self._was_read.clear()
        self._thread = Thread(target=self._run, args=(read, send), name="outgoing", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of the thread, if there is one."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait_until_read(self) -> None:
        """Wait until the thread no longer reads the weights, so that they may change."""
        if self._thread is not None:
            with self.standing_still():
                self._was_read.wait()
        self.check()

    def finish(self) -> None:
        """Wait until the version is published."""
        if self._thread is not None:
            with self.standing_still():
                self._thread.join()
            self._thread = None
        self.check()

    def abandon(self) -> None:
        """Wait for the thread to end, for at most `ABANDON_S`."""
        if self._thread is not None:
            self._thread.join(ABANDON_S)

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Count the time of this block as a wait for a version."""
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
