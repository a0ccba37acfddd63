"""What programs write to stderr."""

import json
import os
import subprocess
import sys
from datetime import datetime

import pytest

WRITE = """
import logging
from coordinator import logs
logs.to_stderr(quiet=False)
log = logging.getLogger("coordinator.test")
log.info("two\\nlines of %s", "a node")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
logging.getLogger("httpx").info("noise")
"""


def written(**more: str) -> list[str]:
    environment = {**os.environ, **more}
    run = subprocess.run(
        [sys.executable, "-P", "-c", WRITE], env=environment, capture_output=True, text=True, check=True
    )
    return run.stderr.splitlines()


def test_for_machines_every_line_is_an_object_whatever_was_said() -> None:
    info, failure = (json.loads(line) for line in written(SWARM_LOG="json"))
    assert info["message"] == "two\nlines of a node"
    assert (info["level"], info["logger"]) == ("info", "coordinator.test")
    assert datetime.fromisoformat(info["time"]).utcoffset() is not None
    assert "ZeroDivisionError" in failure["error"]


def test_for_people_it_is_text() -> None:
    lines = written()
    assert lines[0].endswith(r"INFO two\nlines of a node")
    assert lines[1].endswith("ERROR failed")
    assert all(line.startswith("    | ") for line in lines[2:])
    assert "ZeroDivisionError" in lines[-1]
    with pytest.raises(json.JSONDecodeError):
        json.loads(lines[0])
    assert not any("noise" in line for line in lines)
