"""The agent's side of the engine: starts the child, speaks to it, and puts a fresh one in the place of a failed one.

- One command at a time; every wait has a deadline, and a child that passes it is killed.
- A crash, a hang or a broken frame ends the command with `EngineFailed`; the next command finds a new child, into which
  the last policy was loaded again. Whoever asked decides whether to ask once more.
- A command given up half-way (cancelled, or its iterator closed early) costs the child too: what it would still send
  must not be taken for the answer to the next command.
"""

import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import IO, TypeVar

import trio

from protocol import limits
from protocol.errors import EngineFailed, SwarmError
from swarm_node.engine.messages import (
    LENGTH_BYTES,
    Answer,
    Command,
    Failed,
    Finished,
    Generate,
    GroupDone,
    Load,
    Loaded,
    Measure,
    Measured,
    Ready,
    Request,
    frame,
)

START_TIMEOUT_S = 120.0
"""Importing torch takes 5 s of CPU; a laptop that is busy or wakes a cold disk needs patience."""

LOAD_TIMEOUT_S = 300.0
"""The largest policies are read from disk in this time."""

ANSWER_TIMEOUT_S = 300.0
"""Between two groups: longer than any lease lives."""

GRACE_S = 2.0
"""How long the child may take to leave after its input ended."""

Reply = Ready | Loaded | GroupDone | Finished | Measured | Failed
R = TypeVar("R", Ready, Loaded, GroupDone, Finished, Measured)


def default_command(threads: int) -> list[str]:
    """The engine's console script, beside this interpreter."""
    return [str(Path(sys.executable).with_name("swarm-node")), "engine", "--threads", str(threads)]


class EngineClient:
    """A handle on the engine child; make it with `open_engine`."""

    def __init__(self, command: Sequence[str], log: IO[bytes] | int | None, answer_timeout_s: float) -> None:
        self._command = list(command)
        self._log = log
        self._answer_timeout_s = answer_timeout_s
        self._process: trio.Process | None = None
        self._folder: Path | None = None
        self._turn = trio.Semaphore(1)  # no lock: an iterator may be closed by another task than the one that began it
        self.starts = 0
        """Children started so far: more than one means that the engine failed and was replaced."""

    @property
    def pid(self) -> int | None:
        """The child's process id while there is one."""
        return self._process.pid if self._process else None

    async def load(self, folder: Path) -> Loaded:
        """Load a policy folder, which also becomes what a replaced child starts from."""
        async with self._turn, self._or_nothing():
            await self._start()
            loaded = await self._load(folder)
            self._folder = folder
            return loaded

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[GroupDone, None]:
        """Sample the requests; yields each group as it finishes. Close the iterator if you leave it early."""
        async with self._turn, self._or_nothing():
            await self._start_loaded()
            await self._send(Generate(requests=tuple(requests)))
            while not isinstance(group := await self._receive(self._answer_timeout_s), Finished):
                yield self._expect(group, GroupDone)

    async def measure_throughput(self, *, rows: int = 64, new_tokens: int = 32) -> float:
        """Tokens per second of this machine with the loaded policy."""
        async with self._turn, self._or_nothing():
            await self._start_loaded()
            await self._send(Measure(rows=rows, new_tokens=new_tokens))
            measured = self._expect(await self._receive(self._answer_timeout_s), Measured)
            return measured.tokens / max(measured.seconds, 1e-9)

    async def close(self) -> None:
        """End the child: politely, then for certain."""
        if self._process is None:
            return
        process, self._process = self._process, None
        with trio.CancelScope(shield=True):
            if process.stdin is not None:
                await process.stdin.aclose()
            with trio.move_on_after(GRACE_S):
                await process.wait()
            await _kill(process)

    @asynccontextmanager
    async def _or_nothing(self) -> AsyncIterator[None]:
        """Whatever breaks a command off takes the child with it, unless the child itself reported it."""
        try:
            yield
        except _Reported as reported:
            raise reported.error from None
        except BaseException:
            if self._process is not None:
                process, self._process = self._process, None
                await _kill(process)
            raise

    async def _start_loaded(self) -> None:
        if await self._start() and self._folder is not None:
            await self._load(self._folder)

    async def _start(self) -> bool:
        """Make sure of a child; true if it is a new one."""
        if self._process is not None and self._process.poll() is None:
            return False
        await self.close()
        try:
            self._process = await trio.lowlevel.open_process(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log
            )
        except OSError as error:
            raise EngineFailed(
                f"The engine {self._command[0]} does not start: {error}.", hint="Reinstall with the extra `torch`."
            ) from error
        self.starts += 1
        self._expect(await self._receive(START_TIMEOUT_S), Ready)
        return True

    async def _load(self, folder: Path) -> Loaded:
        await self._send(Load(folder=str(folder)))
        return self._expect(await self._receive(LOAD_TIMEOUT_S), Loaded)

    async def _send(self, body: Load | Generate | Measure) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with self._deadline(self._answer_timeout_s, "take a command"):
            try:
                await self._process.stdin.send_all(frame(Command(body=body)))
            except trio.BrokenResourceError as error:
                raise await self._gone() from error

    async def _receive(self, timeout_s: float) -> Reply:
        with self._deadline(timeout_s, "answer"):
            size_bytes = int.from_bytes(await self._read(LENGTH_BYTES))
            if size_bytes > limits.MESSAGE_MAX_BYTES:
                raise EngineFailed(f"The engine announces a frame of {size_bytes} bytes.", hint="Another program?")
            return Answer.from_bytes(await self._read(size_bytes)).body

    async def _read(self, size_bytes: int) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        parts = bytearray()
        while len(parts) < size_bytes:
            part = await self._process.stdout.receive_some(size_bytes - len(parts))
            if not part:
                raise await self._gone()
            parts += part
        return bytes(parts)

    def _expect(self, reply: Reply, kind: type[R]) -> R:
        if isinstance(reply, Failed):
            raise _Reported(SwarmError.from_wire(reply.model_dump()))
        if not isinstance(reply, kind):
            raise EngineFailed(f"The engine answers {reply.kind} where {kind.__name__} is due.")
        return reply

    @contextmanager
    def _deadline(self, seconds: float, what: str) -> Iterator[None]:
        try:
            with trio.fail_after(seconds):
                yield
        except trio.TooSlowError as error:
            raise EngineFailed(
                f"The engine did not {what} within {seconds:g} s and was stopped.",
                hint="It is started again; if this repeats, take fewer leases at once.",
            ) from error

    async def _gone(self) -> EngineFailed:
        assert self._process is not None
        with trio.move_on_after(GRACE_S):
            await self._process.wait()
        code = self._process.returncode
        died = f"by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        return EngineFailed(f"The engine ended {died}.", hint="It is started again; its log says more.")


class _Reported(Exception):
    """The child itself said that the command failed: it is alive and in step."""

    def __init__(self, error: SwarmError) -> None:
        super().__init__(str(error))
        self.error = error


@asynccontextmanager
async def open_engine(
    command: Sequence[str], *, log: IO[bytes] | int | None = None, answer_timeout_s: float = ANSWER_TIMEOUT_S
) -> AsyncIterator[EngineClient]:
    """An engine that ends with the block; the child starts with the first command, and logs to `log`."""
    client = EngineClient(command, log, answer_timeout_s)
    try:
        yield client
    finally:
        await client.close()


async def _kill(process: trio.Process) -> None:
    """End a child at once and wait until it is gone, so that it leaves no zombie behind."""
    with trio.CancelScope(shield=True):
        process.kill()
        await process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                await pipe.aclose()
