"""The tool `python`, and what the reward `code` runs programs with: a fresh process for each snippet, within limits.

- The process sees neither this process's environment variables nor its modules. Its folder is new, and then removed.
- Time, processor time, memory, output and the size of files are limited, and all its processes end with it.
- It is no sandbox: it has the rights of the process that starts it, which is a task process.
- Hashes and `random` begin the same in every run, so that an episode can be played again.
"""

import asyncio
import json
import os
import secrets
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

CHILD = Path(__file__).with_name("snippet_child.py")

READ_BYTES = 65_536

Status = Literal["ok", "error", "timeout", "output", "crash"]


@dataclass(frozen=True, slots=True)
class SnippetLimits:
    """The limits of one run."""

    wall_s: float = 5.0
    cpu_s: int = 5
    memory_mib: int = 1024
    """Address space, of which a plain interpreter takes 30."""
    output_bytes: int = 65_536
    """The most on standard output, and on standard error; a program that writes more is ended."""
    file_mib: int = 16


DEFAULT_LIMITS = SnippetLimits()


@dataclass(frozen=True, slots=True)
class SnippetResult:
    """The result of one run."""

    status: Status
    """`error`: an exception or a failed check; `output`: too much of it; `crash`: ended by a signal or by itself."""
    stdout: str = ""
    stderr: str = ""
    value: str = ""
    """The last expression of the snippet as text; "" if it has none, or None."""
    passed: int = 0
    """The checks that passed."""
    reason: str = ""


async def python(code: str) -> str:
    """Run a Python program and return its output and the value of its last expression.

    Args:
        code: The program. Each call begins afresh: variables of earlier calls are gone.
    """
    result = await run_snippet(code)
    parts = [result.stdout.rstrip(), result.stderr.rstrip(), result.value]
    if result.status in ("timeout", "output", "crash"):
        parts.append(f"Error: {result.reason}")
    return "\n".join(part for part in parts if part) or "(no output)"


async def run_snippet(
    code: str, *, checks: Sequence[str] = (), stdin: str = "", limits: SnippetLimits = DEFAULT_LIMITS
) -> SnippetResult:
    """Run a snippet, then each of `checks` in its names; return the result, whatever the snippet does."""
    mark = secrets.token_hex(16)
    task = {"code": code, "checks": list(checks), "mark": mark, "limits": _rlimits(limits)}
    data = json.dumps(task).encode()
    sent = len(data).to_bytes(8, "big") + data + stdin.encode(errors="surrogatepass")
    with tempfile.TemporaryDirectory(prefix="snippet-", ignore_cleanup_errors=True) as folder:
        run = _Run(*await _started(folder), limits)
        try:
            timed_out = await run.finish(sent)
        finally:
            await run.end()
    return _result(run, mark, limits, timed_out=timed_out)


async def _started(folder: str) -> tuple[Process, bool]:
    """Start a process; return it, and True if it leads a process group of its own.

    A sandbox forbids new groups, so that it can end all that it has started; what a snippet leaves behind ends with it.
    """
    start = partial(
        asyncio.create_subprocess_exec,
        *(sys.executable, "-s", "-P", str(CHILD)),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        cwd=folder,
        env=_environment(folder),
    )
    try:
        return await start(start_new_session=True), True
    except PermissionError:
        return await start(), False


class _Run:
    """One process and its output so far."""

    def __init__(self, process: Process, leads_group: bool, limits: SnippetLimits) -> None:
        self.process, self._leads_group, self._limits = process, leads_group, limits
        self.stdout, self.stderr = bytearray(), bytearray()
        self.too_much = False

    async def finish(self, sent: bytes) -> bool:
        """Send the input and read the output to their ends; return True at the time limit."""
        try:
            async with asyncio.timeout(self._limits.wall_s), asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send(sent))
                tasks.create_task(self._collect(self.process.stdout, self.stdout))
                tasks.create_task(self._collect(self.process.stderr, self.stderr))
        except TimeoutError:
            return True
        return False

    async def end(self) -> None:
        self._kill()
        await self.process.wait()
        # asyncio keeps the pipes' transports until they are closed.
        self.process._transport.close()  # type: ignore[attr-defined]  # there is no public way

    async def _send(self, data: bytes) -> None:
        assert self.process.stdin is not None
        with suppress(ConnectionError):
            self.process.stdin.write(data)
            await self.process.stdin.drain()
        self.process.stdin.close()

    async def _collect(self, stream: asyncio.StreamReader | None, into: bytearray) -> None:
        assert stream is not None
        while data := await stream.read(READ_BYTES):
            into += data
            if len(into) > self._limits.output_bytes:
                self.too_much = True
                self._kill()
                return

    def _kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            if self._leads_group:
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()


def _result(run: _Run, mark: str, limits: SnippetLimits, *, timed_out: bool) -> SnippetResult:
    printed, records = _split(bytes(run.stdout[: limits.output_bytes]), mark)
    errors = [str(record["error"]) for record in records if "error" in record]
    done = next((record for record in records if "done" in record), {})
    status: Status = "error" if errors else "ok"
    reason = errors[0] if errors else ""
    if run.too_much:
        status, reason = "output", f"It wrote more than {limits.output_bytes} bytes."
    elif timed_out:
        status, reason = "timeout", f"It took more than {limits.wall_s:g} s."
    elif not done and not errors:
        status, reason = "crash", _how_it_ended(run.process.returncode)
    return SnippetResult(
        status,
        printed,
        bytes(run.stderr[: limits.output_bytes]).decode(errors="replace"),
        str(done.get("value", "")),
        sum("passed" in record for record in records),
        reason,
    )


def _split(output: bytes, mark: str) -> tuple[str, list[dict[str, Any]]]:
    """Return what the snippet printed, and the records."""
    printed, *rest = output.split(f"\n{mark}".encode())
    records = []
    for each in rest:
        line, _, more = each.partition(b"\n")
        printed += more
        with suppress(ValueError):
            if isinstance(record := json.loads(line), dict):
                records.append(record)
    return printed.decode(errors="replace"), records


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return "It used too much processor time." if name == "SIGXCPU" else f"It was ended by {name}."
    return f"It ended itself with code {code}."


def _rlimits(limits: SnippetLimits) -> dict[str, int]:
    return {
        "RLIMIT_AS": limits.memory_mib * 2**20,
        "RLIMIT_CPU": limits.cpu_s,
        "RLIMIT_FSIZE": limits.file_mib * 2**20,
        "RLIMIT_CORE": 0,
    }


def _environment(folder: str) -> dict[str, str]:
    """Return the variables of the process; keys and paths of this one are none of its business."""
    return {
        "HOME": folder,
        "TMPDIR": folder,
        "PATH": os.defpath,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
