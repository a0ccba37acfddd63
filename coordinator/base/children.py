"""Child processes: started, watched, started again when they crash, and ended with the coordinator.

- Each child's standard input is a pipe that only we hold: however the coordinator ends, `kill -9` included, the pipe
  closes and the child leaves by itself.
- A child that crashes is started again after a growing pause; the restart is logged with the exit code.
- Whoever keeps one may hear how it fares.
"""

import asyncio
import logging
import os
import sys
import threading
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

log = logging.getLogger(__name__)

PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Pauses before the first, second … restart; the last is repeated."""

WRONG_SETTING = 2
"""Both programs' exit code for what starting again cannot mend."""

NOT_INHERITED = "AWS_"
"""The object store's credentials are the coordinator's alone."""

GRACE_S = 2.0
"""How long a child may take to leave after its input closed."""


@dataclass(frozen=True)
class Life:
    """How a child fares."""

    state: Literal["runs", "crashed", "ended"]
    """Crashed: it is started again in a moment."""
    code: int | None
    """With which it ended last."""
    restarts: int


async def _nobody_listens(_life: Life) -> None:
    """It is in the log."""


def leave_with_parent() -> None:
    """The child's side: the coordinator holds our standard input open, and when it ends, nobody wants our work."""
    threading.Thread(target=_exit_after_input, daemon=True).start()


def _exit_after_input() -> None:
    # A plain read: the interpreter may end while it waits, and a buffered one would hold a lock.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


def script(name: str) -> str:
    """A console script beside this interpreter; `python -m` would put the working directory first on the path."""
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
    """Run a child until this task is cancelled, or until it is done (code 0) or refuses its settings, if it may end."""
    crashes, code = 0, None
    while True:
        await tell(Life("runs", code, crashes))
        code = await _run_once(name, command, log_file, on_line)
        if may_end and code == 0:
            await tell(Life("ended", code, crashes))
            return
        if may_end and code == WRONG_SETTING:
            log.error("%s refuses its settings and is not started again (see %s)", name, log_file)
            await tell(Life("ended", code, crashes))
            return
        pause_s = PAUSES_S[min(crashes, len(PAUSES_S) - 1)]
        crashes += 1
        await tell(Life("crashed", code, crashes))
        log.error("%s ended with code %s; starting it again in %.1f s (see %s)", name, code, pause_s, log_file)
        await asyncio.sleep(pause_s)


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
