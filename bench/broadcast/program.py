"""A program run by one party: it speaks lines of JSON on stdout, and what it logs is kept in a file."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.broadcast.net import Net

START_S = 120.0
"""The time limit for sixteen interpreters that start at once on two cores."""

END_S = 15.0

Line = dict[str, Any]


def script(name: str) -> str:
    """A console script beside this interpreter."""
    return str(Path(sys.executable).with_name(name))


def module(name: str) -> list[str]:
    """A module of this package as a program."""
    return [sys.executable, "-P", "-m", f"bench.broadcast.{name}"]


class Program:
    """A running program."""

    def __init__(self, net: Net, party: str, command: Sequence[str], log: Path) -> None:
        self.party = party
        self._log = log
        self._said: list[Line] = []
        self._news = threading.Condition()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                net.command(party, command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, name=f"{party} output")
        self._reader.start()

    def tell(self, line: Line) -> None:
        """Send a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line).encode() + b"\n")
        self._process.stdin.flush()

    def heard(self, what: str, wanted: Callable[[Line], bool], *, within_s: float = START_S) -> Line:
        """The first line that is wanted, once it is said."""
        deadline = time.monotonic() + within_s
        with self._news:
            while True:
                for line in self._said:
                    if wanted(line):
                        return line
                patience_s = deadline - time.monotonic()
                if patience_s <= 0 or not self._reader.is_alive():
                    raise TimeoutError(f"{self.party}: {what} did not come in {within_s:.0f} s\n{self.last_words()}")
                self._news.wait(min(patience_s, 1.0))

    def ended(self, *, within_s: float) -> None:
        """Wait until it has ended by itself, and as it should."""
        if code := self._process.wait(within_s):
            raise RuntimeError(f"{self.party}: ended with {code}\n{self.last_words()}")

    def failed(self) -> bool:
        """Return True if the program ended with an error."""
        return bool(self._process.poll())

    def said(self, wanted: Callable[[Line], bool]) -> int:
        """Return the number of lines so far for which `wanted` is true."""
        with self._news:
            return sum(map(wanted, self._said))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; to one that has ended, nothing."""
        if self._process.poll() is None:
            os.kill(self._process.pid, number)

    def end(self) -> None:
        """End the program as Ctrl-C does; by force if that does not help."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGINT)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._reader.join()

    def kill(self) -> None:
        """Kill the program as `kill -9` does."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def last_words(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with self._news:
                    self._said.append(_parsed(line))
                    self._news.notify_all()
        with self._news:
            self._news.notify_all()


def _parsed(line: bytes) -> Line:
    """A line of JSON, or a line of plain text under the name `text`."""
    try:
        value = json.loads(line)
    except ValueError:
        return {"text": line.decode(errors="replace").strip()}
    return value if isinstance(value, dict) else {"text": str(value)}
