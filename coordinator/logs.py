"""Logs of this program and its children on stderr: lines for people, or an object a line for machines.

- `SWARM_LOG=json` asks for objects; `--log-json` sets it, so that learner and auditor, which inherit it, do the same.
- A record is one line: no text in it can begin another that looks like ours, or steer a terminal.
- An object has `time` (UTC), `level`, `logger` and `message`, and `error` with the traceback where there is one.
"""

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any

VARIABLE = "SWARM_LOG"
NOISY = ("httpx", "httpcore", "asyncio", "alembic")


GUTTER = "    | "
"""Before each line of a traceback: no error's own text passes for a record."""


class Lines(logging.Formatter):
    """A line for a record, whatever strangers and their rewards have put into it; tracebacks below, set off."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # the library's name
        return one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # the library's name
        return "\n".join(f"{GUTTER}{one_line(line)}" for line in super().formatException(ei).splitlines())


def one_line(text: str) -> str:
    """The same with what would begin a line or steer a terminal written out, as `\\n` or `\\x1b`."""
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape", "surrogatepass").decode() for sign in text
    )


class JsonLines(logging.Formatter):
    """One JSON object per record, on one line."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            told["error"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False)


def are_objects() -> bool:
    """Whether machines read them."""
    return os.environ.get(VARIABLE) == "json"


def to_stderr(quiet: bool) -> None:
    """What every command does before it works."""
    handler = logging.StreamHandler(sys.stderr)
    lines = Lines("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    handler.setFormatter(JsonLines() if are_objects() else lines)
    logging.basicConfig(level=logging.WARNING if quiet else logging.INFO, handlers=[handler])
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
