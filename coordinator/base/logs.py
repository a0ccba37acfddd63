"""Logs of this program and its children on stderr, in the format of `protocol.text.log_lines`.

- `--log-json` sets the variable, so that learner and auditor, which inherit it, write JSON objects as well.
"""

import logging
import os
import sys

from protocol.text.log_lines import VARIABLE, formatter

NOISY = ("httpx", "httpcore", "asyncio", "alembic")

NO_BARS = "TQDM_DISABLE"
"""The variable with which libraries, also in child processes, draw no progress bars: in a file these are no lines."""


def are_objects() -> bool:
    """Return True if logs are written as JSON objects."""
    return os.environ.get(VARIABLE) == "json"


def to_stderr(quiet: bool) -> None:
    """Set up logging for a command; `quiet` shows warnings and errors only."""
    if not sys.stderr.isatty():
        os.environ.setdefault(NO_BARS, "1")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(os.environ.get(VARIABLE)))
    logging.basicConfig(level=logging.WARNING if quiet else logging.INFO, handlers=[handler])
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
