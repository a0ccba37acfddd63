"""Programs under test: started as people start them, watched through their logs, and counted at the end.

- Every program carries a mark in its environment, which its children inherit: whoever has it belongs to the test.
- Every wait has a deadline and says what it waits for; it looks at real state, never at a clock alone.
- Closing a swarm ends every program and then demands that no marked process is left.
"""

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

T = TypeVar("T")

PATIENCE_S = 90.0
"""The limit of anything that should take seconds: importing torch alone may take twenty of them on a busy machine."""

ENDS_WITHIN_S = 15.0
"""Ctrl-C is to end everything in 5 s; the deadline leaves room for a machine that is busy with other things."""

_MARK = "ECHO_SWARM_TEST"
_POLL = threading.Event()

_POLL_S = 0.1
"""The pause between two looks. Each may cost a coordinator the computation of its status, or a copy of its store."""


def words_of(process: psutil.Process) -> list[str]:
    """Return a process's command line; empty if it has ended since it was listed."""
    try:
        words: list[str] = process.cmdline()
    except psutil.NoSuchProcess:  # a zombie counts as one
        return []
    return words


def until(what: str, look: Callable[[], T], *, within_s: float = PATIENCE_S) -> T:
    """The first truthy thing that `look` finds."""
    deadline = time.monotonic() + within_s
    while not (result := look()):
        if time.monotonic() > deadline:
            pytest.fail(f"Waited {within_s:g} s for {what}; last seen: {result!r}")
        _POLL.wait(_POLL_S)
    return result


def script(name: str) -> str:
    """A console script beside this interpreter."""
    return str(Path(sys.executable).with_name(name))


SHARES = 8
"""Test processes that have ports of their own."""

_given = set[int]()


def free_address(host: str = "127.0.0.1") -> str:
    """A free address, on loopback by default, that stays free while a program is away that was killed.

    The kernel gives its port to nobody who does not ask for it by number: those that it does give begin at 32768 here,
    and above that elsewhere. No address is given twice, and no other process of this test run gives the same.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = 20_000 + secrets.randbelow(12_000 // SHARES) * SHARES + worker % SHARES
        with socket.socket() as probe, suppress(OSError):
            if port not in _given:
                probe.bind((host, port))
                _given.add(port)
                return f"{host}:{port}"


class Program:
    """A running program: its process, its output, and how it ended."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, mark: str) -> None:
        self.name = name
        self._paths = {kind: folder / f"{name}.{kind}" for kind in ("out", "err")}
        self._from = {kind: _size(path) for kind, path in self._paths.items()}
        with self._paths["out"].open("ab") as out, self._paths["err"].open("ab") as err:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=os.environ | {_MARK: mark},
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def output(self) -> str:
        """Standard output since this start."""
        return self._read("out")

    @property
    def log(self) -> str:
        """Standard error since this start."""
        return self._read("err")

    def said(self, pattern: str, *, after: int = 0, within_s: float = PATIENCE_S) -> re.Match[str]:
        """Wait for a line in the log (from an offset on) or in the output; fails at once if the program ends."""
        sought = re.compile(pattern, re.MULTILINE)

        def look() -> re.Match[str] | None:
            ended = not self.running
            match = sought.search(self.log, after) or sought.search(self.output)
            if not match and ended:
                pytest.fail(f"{self.name} ended with {self.process.returncode} and never said {pattern!r}")
            return match

        match = until(f"{self.name} to say {pattern!r}", look, within_s=within_s)
        assert match
        return match

    def descendants(self) -> list[psutil.Process]:
        """Every process below this one."""
        try:
            below: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return below

    def kill(self) -> None:
        """Kill only this process, without warning, as `kill -9` does."""
        self.process.kill()
        self.process.wait(timeout=PATIENCE_S)

    def interrupt(self) -> float:
        """Interrupt as Ctrl-C does; return the seconds until this process and all its children ended."""
        family = [psutil.Process(self.process.pid), *self.descendants()]
        started = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        until(
            f"{self.name} and its {len(family) - 1} children to end after Ctrl-C",
            lambda: self.process.poll() is not None and not any(alive(member) for member in family),
            within_s=ENDS_WITHIN_S,
        )
        return time.monotonic() - started

    def _read(self, kind: str) -> str:
        with self._paths[kind].open("rb") as file:
            file.seek(self._from[kind])
            return file.read().decode(errors="replace")


class Swarm:
    """All programs of one test or module, in one folder."""

    open: list["Swarm"] = []  # noqa: RUF012  # shared on purpose: whoever reports a failure shows all logs

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._logs = folder / "logs"
        self._logs.mkdir(parents=True)
        self._mark = secrets.token_hex(8)
        self._programs: list[Program] = []
        self._closers: list[Callable[[], None]] = []
        Swarm.open.append(self)

    def start(self, name: str, *command: str) -> Program:
        """Start a program; one of the same name continues its logs."""
        program = Program(name, command, self._logs, self._mark)
        self._programs.append(program)
        return program

    def at_end(self, close: Callable[[], None]) -> None:
        """Call this when the swarm is closed, after its programs have ended; the last one first."""
        self._closers.append(close)

    def members(self) -> list[psutil.Process]:
        """Every living process that one of our programs or their children started."""
        return [process for process in psutil.process_iter() if alive(process) and self._is_ours(process)]

    def last_words(self) -> list[tuple[str, str]]:
        """The end of every log, for a failure report."""
        logs = sorted(path for path in self.folder.rglob("*") if path.suffix in (".err", ".out", ".log"))
        return [(str(path.relative_to(self.folder)), path.read_text(errors="replace")[-4000:]) for path in logs]

    def close(self) -> None:
        """End everything; a process that survives its program is a failure."""
        for program in reversed(self._programs):
            if program.running:
                program.process.send_signal(signal.SIGINT)
        for program in self._programs:
            try:
                program.process.wait(timeout=ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                program.kill()
        for close in reversed(self._closers):
            close()
        try:
            until("every process of the test to be gone", lambda: not self.members(), within_s=ENDS_WITHIN_S)
        finally:
            for process in self.members():
                process.kill()
            Swarm.open.remove(self)

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return bool(process.environ().get(_MARK) == self._mark)
        except (psutil.Error, OSError):
            return False


def alive(process: psutil.Process) -> bool:
    """Return True if a process runs; a zombie does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def said(swarm: Swarm, program: str, *words: str, code: int = 0) -> str:
    """Run a command; return its output on both streams."""
    ran = swarm.start(words[0], script(program), *words)
    assert ran.process.wait(timeout=PATIENCE_S) == code, ran.log
    return ran.output + ran.log
