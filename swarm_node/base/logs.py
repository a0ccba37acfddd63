"""Logs of the agent and of its engine on stderr, written as `protocol.text.log_lines` says.

- `--log-json` sets the variable, so that the engine, which inherits it, writes objects as well.
- The agent keeps its last lines in memory, for the owner's page.
- Lines of the tasks of one of several rounds name it.
"""

import logging
import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from protocol.text.log_lines import ROUND, VARIABLE, formatter

NOISY = ("httpx", "httpcore", "libp2p", "multiaddr", "tuf")

KEPT_LINES, KEPT_LINE_MAX_CHARS = 100, 500
"""Bounds of the lines in memory: together 50 kB."""

NO_BARS = "TQDM_DISABLE"
"""The variable with which libraries, also in child processes, draw no progress bars: in a file these are no lines."""


DRAWN = "drawn"
"""The attribute of a record whose content the live view draws: there it is no line of its own."""


round_name: ContextVar[str] = ContextVar("round_name", default="")
"""The name of the round of a task, and of the tasks and threads that it starts; empty with one round."""


def add_round_name(record: logging.LogRecord) -> bool:
    """Add the name of the task's round to a record; a filter of handlers, which keeps every record."""
    setattr(record, ROUND, round_name.get())
    return True


def are_objects() -> bool:
    """Return True if log lines are JSON objects."""
    return os.environ.get(VARIABLE) == "json"


def to_stderr(quiet: bool) -> None:
    """Set up logging to standard error; every command calls it first."""
    if not sys.stderr.isatty():
        os.environ.setdefault(NO_BARS, "1")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(os.environ.get(VARIABLE)))
    handler.addFilter(add_round_name)
    logging.basicConfig(level=logging.WARNING if quiet else logging.INFO, handlers=[handler])
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)


class LastLines(logging.Handler):
    """Handler that keeps the last log lines as text for people, whatever the format of the log."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(formatter(None))
        self.addFilter(add_round_name)
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:  # as every handler of the library does: a wrong record must not end whoever logs it
            self.handleError(record)
            return
        self._lines.extend(line[:KEPT_LINE_MAX_CHARS] for line in text.splitlines())

    @property
    def lines(self) -> list[str]:
        """The kept lines, the oldest first."""
        return list(self._lines)


@contextmanager
def keep_last_lines() -> Iterator[LastLines]:
    """Keep the last lines of every logger for the duration of the block."""
    kept = LastLines()
    logging.getLogger().addHandler(kept)
    try:
        yield kept
    finally:
        logging.getLogger().removeHandler(kept)
