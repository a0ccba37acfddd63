"""Logs of the agent and of its engine on stderr, written as `protocol.text.log_lines` says.

- `--log-json` sets the variable, so that the engine, which inherits it, writes objects as well.
"""

import logging
import os
import sys

from protocol.text.log_lines import VARIABLE, formatter

NOISY = ("httpx", "httpcore", "libp2p", "multiaddr")


def are_objects() -> bool:
    """Return True if log lines are JSON objects."""
    return os.environ.get(VARIABLE) == "json"


def to_stderr(quiet: bool) -> None:
    """Set up logging to standard error; every command calls it first."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(os.environ.get(VARIABLE)))
    logging.basicConfig(level=logging.WARNING if quiet else logging.INFO, handlers=[handler])
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
