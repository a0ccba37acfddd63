"""The last log lines, as the owner's page shows them: bounded, and each record on lines of its own."""

import json
import logging
import subprocess
import sys

import pytest
import trio

from protocol.text.log_lines import formatter
from swarm_node.base.logs import (
    KEPT_LINE_MAX_CHARS,
    KEPT_LINES,
    LastLines,
    add_round_name,
    keep_last_lines,
    round_name,
)

log = logging.getLogger("swarm_node.test")


def test_a_log_of_a_node_has_no_lines_of_libraries_about_other_things() -> None:
    """TUF writes one for each old key, after a rotation of keys that nothing is wrong with."""
    logged = "logging.getLogger('tuf.api._payload').info('No signature for keyid 1')"
    program = f"import logging; from swarm_node.base import logs; logs.to_stderr(quiet=False); {logged}"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stderr == ""


def test_the_last_lines_of_every_logger_are_kept_and_no_more() -> None:
    log.setLevel(logging.INFO)
    with keep_last_lines() as kept:
        for number in range(KEPT_LINES + 5):
            log.info("line %d", number)
        log.warning("%s", "long" * KEPT_LINE_MAX_CHARS)
        log.info("forged\n12:00:00 INFO paid\x1b[2J")
    log.info("afterwards")
    assert len(kept.lines) == KEPT_LINES
    assert kept.lines[0].endswith("INFO line 7")
    assert len(kept.lines[-2]) == KEPT_LINE_MAX_CHARS
    assert kept.lines[-1].endswith(r"INFO forged\n12:00:00 INFO paid\x1b[2J")


def test_a_traceback_is_kept_line_by_line() -> None:
    kept = LastLines()
    try:
        raise ValueError("broken")
    except ValueError:
        kept.handle(logging.LogRecord("x", logging.ERROR, "x.py", 1, "failed", None, sys.exc_info()))
    assert kept.lines[0].endswith("ERROR failed")
    assert kept.lines[-1] == "    | ValueError: broken"


def test_a_record_that_cannot_be_formatted_ends_nobody() -> None:
    kept = LastLines()
    kept.handle(logging.LogRecord("x", logging.INFO, "", 1, "%d", ("text",), None))
    kept.handle(logging.LogRecord("x", logging.INFO, "", 1, "%d", (7,), None))
    assert [line[-1] for line in kept.lines] == ["7"]


@pytest.mark.trio
async def test_lines_of_the_tasks_and_threads_of_a_round_name_it() -> None:
    log.setLevel(logging.INFO)

    async def work(name: str) -> None:
        round_name.set(name)
        async with trio.open_nursery() as inner:
            inner.start_soon(trio.to_thread.run_sync, log.info, "100 % of it")

    with keep_last_lines() as kept, keep_last_lines() as again:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work, "a.example:8700")
            nursery.start_soon(work, "evil\n12:00:00 INFO paid %s")
        log.info("of no round")
    assert kept.lines == again.lines, "one handler changes no record of another"
    first, second, third = sorted(line.partition(" INFO ")[2] for line in kept.lines)
    assert first == "[a.example:8700] 100 % of it"
    assert second == r"[evil\n12:00:00 INFO paid %s] 100 % of it"
    assert third == "of no round"


def test_an_object_names_its_round_if_there_are_several() -> None:
    record = logging.LogRecord("x", logging.INFO, "x.py", 1, "text", None, None)
    for name, fields in (("", {}), ("a.example", {"round": "a.example"})):
        round_name.set(name)
        assert add_round_name(record)
        told = json.loads(formatter("json").format(record))
        assert {key: told[key] for key in told if key == "round"} == fields
        assert told["message"] == "text"
    round_name.set("")
