"""How a log record is written, by every program: a line for people, or an object a line for machines.

- A record is one line: no text in it can begin another that looks like ours, or steer a terminal.
- An object has `time` (UTC), `level`, `logger` and `message`, and `error` with the traceback where there is one.
- Nothing is written here, and nothing decided: a program's own room chooses where its log goes.
"""

import json
import logging
from datetime import UTC, datetime
from typing import Any

from protocol.text.plain import one_line

VARIABLE = "SWARM_LOG"
"""The environment's word for what a program and its children write: `json` asks for objects."""

GUTTER = "    | "
"""Before each line of a traceback: no error's own text passes for a record."""


class Lines(logging.Formatter):
    """A line for a record, whatever strangers and their rewards have put into it; tracebacks below, set off."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # the library's name
        return one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # the library's name
        return "\n".join(f"{GUTTER}{one_line(line)}" for line in super().formatException(ei).splitlines())


class JsonLines(logging.Formatter):
    """One JSON object per record, on one line, in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            told["error"] = self.formatException(record.exc_info)
        return json.dumps(told)


def formatter(wanted: str | None) -> logging.Formatter:
    """What writes records as the environment asks for."""
    lines = Lines("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    return JsonLines() if wanted == "json" else lines
