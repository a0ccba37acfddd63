"""Log formats of every program: one line of text per record for people, or one JSON object per line for machines.

- A record is one line: no text in it can forge another record or control a terminal.
- An object has `time` (UTC), `level`, `logger` and `message`, and `error` with the traceback where there is one.
- A record with a round's name (`ROUND`) shows it: an agent may take part in several rounds.
- This module only formats: each program decides where its log goes.
"""

import json
import logging
from datetime import UTC, datetime
from typing import Any

from protocol.text.plain import one_line

VARIABLE = "SWARM_LOG"
"""The environment variable with the log format of a program and its children: `json` selects objects."""

ROUND = "round"
"""The attribute of a record with the name of the round that it is about."""

GUTTER = "    | "
"""The prefix of each line of a traceback, so that an error's text cannot look like a record."""


class Lines(logging.Formatter):
    """Records as one line each, whatever untrusted text they contain; traceback lines follow, each with a prefix."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # the library's name
        if name := getattr(record, ROUND, ""):
            record.message = f"[{name}] {record.message}"
        return one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # the library's name
        return "\n".join(f"{GUTTER}{one_line(line)}" for line in super().formatException(ei).splitlines())


class JsonLines(logging.Formatter):
    """Records as JSON objects, each on one line, in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if name := getattr(record, ROUND, ""):
            fields[ROUND] = name
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def formatter(wanted: str | None) -> logging.Formatter:
    """Return the formatter for a value of `SWARM_LOG`."""
    lines = Lines("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    return JsonLines() if wanted == "json" else lines
