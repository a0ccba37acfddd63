"""A node that somebody's program started: it leaves, as Ctrl-C would have it, when its standard input ends."""

import os
import signal
import sys
import threading

READ_BYTES = 4096


def leave_with_parent() -> None:
    """Watch standard input from now on."""
    threading.Thread(target=_leave_after_input, name="parent", daemon=True).start()


def _leave_after_input() -> None:
    # A plain read: the interpreter may end while it waits, and a buffered one would hold a lock.
    while os.read(sys.stdin.fileno(), READ_BYTES):
        pass
    os.kill(os.getpid(), signal.SIGINT)
