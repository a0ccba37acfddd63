"""Child processes: started, watched, started again when they crash, and ended with the coordinator.

- Each child's standard input is a pipe that only the coordinator holds: however that ends, `kill -9` included, the pipe
  closes and the child exits by itself.
- A child that crashes is started again after a growing pause; the restart is logged with the exit code or the signal,
  and the last line of the child's own log.
- The caller of `keep_running` can follow a child's state.
"""

import asyncio
import logging
import os
import re
import shutil
import signal
import sys
import threading
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from protocol.limits import retry_pause_s
from protocol.text.plain import visible

log = logging.getLogger(__name__)

WRONG_SETTING = 2
"""The exit code of both programs for an error that a restart cannot fix."""

NOT_INHERITED = ("AWS_", "SWARM_SMTP_")
"""The prefixes of variables that children do not get: credentials of the object store and of the mail server."""

REASON_BYTES, REASON_CHARS = 4096, 300
"""The end of a child's log that is searched for its last line, and the part of that line that is logged here."""

FULL_BYTES = 2**20
"""The free space below which a disk counts as full: enough for the last words of a child, and for nothing else."""

GRACE_S = 2.0
"""The time that a child may take to exit after its input has closed."""


@dataclass(frozen=True)
class Life:
    """The state of a child."""

    state: Literal["runs", "crashed", "ended"]
    """A crashed child is started again after a pause."""
    code: int | None
    """The exit code of its last run."""
    restarts: int


TRACEBACK = "Traceback (most recent call last):"

LOG_LINE = re.compile(r"\d\d:\d\d:\d\d [A-Z]+ |\{")
"""The beginning of a log line, as text or as JSON: what came before it was not the end."""


async def _nobody_listens(_life: Life) -> None:
    """Ignore the state, which is in the log."""


def leave_with_parent(code: int = 0) -> None:
    """Exit this process, a child, with `code` when the program that holds our standard input open ends."""
    threading.Thread(target=_exit_after_input, args=(code,), daemon=True).start()


def _exit_after_input(code: int) -> None:
    # A plain read: the interpreter may end while it waits, and a buffered one would hold a lock.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(code)


def script(name: str) -> str:
    """Return the path of a console script beside this interpreter; `python -m` would search the working directory."""
    return str(Path(sys.executable).with_name(name))


async def keep_running(
    name: str,
    command: Sequence[str],
    *,
    log_file: Path,
    on_line: Callable[[str], None] | None = None,
    may_end: bool = True,
    tell: Callable[[Life], Awaitable[None]] = _nobody_listens,
) -> None:
    """Run a child until this task is cancelled; if `may_end`, until it exits with code 0 or refuses its settings."""
    crashes, code = 0, None
    while True:
        await tell(Life("runs", code, crashes))
        before = _size(log_file)
        code = await _run_once(name, command, log_file, on_line)
        if may_end and code == 0:
            await tell(Life("ended", code, crashes))
            return
        if may_end and code == WRONG_SETTING:
            refused = "%s refuses its settings and is not started again%s (see %s)"
            log.error(refused, name, _after(why_it_ended(log_file, before)), log_file)
            await tell(Life("ended", code, crashes))
            return
        pause_s = retry_pause_s(crashes)
        crashes += 1
        await tell(Life("crashed", code, crashes))
        reason = "" if code == -signal.SIGKILL else why_it_ended(log_file, before)  # a killed child writes none
        restarted = "%s %s; starting it again in %.1f s%s (see %s)"
        log.error(restarted, name, end_text(code), pause_s, _after(reason), log_file)
        await asyncio.sleep(pause_s)


def end_text(code: int | None) -> str:
    """Return how a child ended, by its exit code: the end of a sentence about it."""
    if code is None or code >= 0:
        return f"ended with code {code}"
    by_memory = ", perhaps since memory ran out" if code == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{by_memory}"


def why_it_ended(log_file: Path, before: int, *, full_bytes: int = FULL_BYTES) -> str:
    """Return why a child ended; on a full disk, its log lacks the error, or a part of it."""
    if shutil.disk_usage(log_file.parent).free < full_bytes:
        return f"The disk of {log_file.parent} is full. Free some space."
    return last_line(log_file, before)


def _size(log_file: Path) -> int:
    return log_file.stat().st_size if log_file.exists() else 0


def last_line(log_file: Path, before: int = 0) -> str:
    """Return the last line that was written to a log after its first `before` bytes; usually the error of its end.

    Of an error of several lines at the end, such as that of a wrong value in a model, it is the first.
    """
    try:
        with log_file.open("rb") as file:
            file.seek(max(before, file.seek(0, os.SEEK_END) - REASON_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    if TRACEBACK in lines:
        after = lines[len(lines) - lines[::-1].index(TRACEBACK) :]
        error = [line for line in after if line and not line[0].isspace()]
        if error and not any(LOG_LINE.match(line) for line in error):
            last = error[0]
    return visible(last, REASON_CHARS)


def _after(reason: str) -> str:
    return f": {reason}" if reason else ""


async def _run_once(
    name: str, command: Sequence[str], log_file: Path, on_line: Callable[[str], None] | None
) -> int | None:
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as stderr:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=PIPE if on_line else DEVNULL,
            stderr=stderr,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)},
        )
    log.info("%s started, pid %d", name, process.pid)
    try:
        while process.stdout and on_line and (line := await process.stdout.readline()):
            on_line(line.decode(errors="replace").strip())
        return await process.wait()
    finally:
        await _end(process)


async def _end(process: Process) -> None:
    """Close the child's input, wait a little, then kill."""
    if process.stdin:
        process.stdin.close()
    if process.returncode is None:
        try:
            await asyncio.wait_for(asyncio.shield(process.wait()), GRACE_S)
        except TimeoutError:
            process.kill()
            await process.wait()
