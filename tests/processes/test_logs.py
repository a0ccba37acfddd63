"""Log output of all programs to stderr: a record is one line, whatever untrusted text it contains."""

import json
import os
import subprocess
import sys
from datetime import datetime

import pytest

WRITE = """
import logging
from ROOM.base import logs
logs.to_stderr(quiet=False)
log = logging.getLogger("ROOM.test")
log.info("two\\nlines of %s", "a \\x1b[2J\\x9b2J\\u2028\\u202enode")
try:
    raise ValueError("worse\\n12:00:00 INFO forged \\x1b[2J")
except ValueError:
    log.exception("failed")
logging.getLogger("httpx").info("noise")
"""

ROOMS = pytest.mark.parametrize("room", ["coordinator", "swarm_node"])


def written(room: str, **more: str) -> list[str]:
    environment = {**os.environ, **more}
    command = [sys.executable, "-P", "-c", WRITE.replace("ROOM", room)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr.splitlines()


@ROOMS
def test_for_machines_every_line_is_an_object_whatever_was_said(room: str) -> None:
    info, failure = (json.loads(line) for line in written(room, SWARM_LOG="json"))
    assert info["message"] == "two\nlines of a \x1b[2J\x9b2J\u2028\u202enode"
    assert (info["level"], info["logger"]) == ("info", f"{room}.test")
    assert datetime.fromisoformat(info["time"]).utcoffset() is not None
    assert "ValueError" in failure["error"]


@ROOMS
def test_for_people_it_is_text(room: str) -> None:
    lines = written(room)
    assert lines[0].endswith(r"INFO two\nlines of a \x1b[2J\x9b2J\u2028\u202enode")
    assert lines[1].endswith("ERROR failed")
    assert all(line.startswith("    | ") for line in lines[2:])
    assert any("ValueError" in line for line in lines[2:])
    assert lines[-1].endswith(r"INFO forged \x1b[2J")
    assert not any("noise" in line for line in lines)


@ROOMS
def test_nothing_in_a_log_steers_a_terminal(room: str) -> None:
    for wanted in ("", "json"):
        assert all(line.isprintable() for line in written(room, SWARM_LOG=wanted))
