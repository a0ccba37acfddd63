"""Logs of this program and its children on stderr, written as `protocol.text.log_lines` says.

- `--log-json` sets the variable, so that learner and auditor, which inherit it, write objects as well.
"""

import logging
import os
import sys

from protocol.text.log_lines import VARIABLE, formatter

NOISY = ("httpx", "httpcore", "asyncio", "alembic")


def are_objects() -> bool:
    """Whether machines read them."""
    return os.environ.get(VARIABLE) == "json"


def to_stderr(quiet: bool) -> None:
    """What every command does before it works."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(os.environ.get(VARIABLE)))
    logging.basicConfig(level=logging.WARNING if quiet else logging.INFO, handlers=[handler])
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
