"""The agent's side of the engine: starts the child, speaks to it, and puts a fresh one in the place of a failed one.

- Every wait has a deadline, and a child that passes it is killed.
- A crash, a hang or a broken frame ends the call with `EngineFailed`, and with it all requests that are not answered.
  The next request finds a new child, into which the last policy was loaded again.
- Which engine it is may depend on the policy; one of another kind takes another child. An engine that cannot load a
  policy gives way to the next that may; it is remembered as unfit once another could: else the policy is to blame.
- A call that its caller gives up half-way costs the child, too: half a frame, or the answer to a command that nobody
  awaits, must not be taken for what is asked next. To give requests up and keep the child, there is `cancel`.
"""

import logging
import signal
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import IO, TypeVar

import trio

from protocol import limits
from protocol.errors import ConfigInvalid, EngineFailed, SwarmError
from swarm_node.engine.choose import Choice
from swarm_node.engine.messages import (
    LENGTH_BYTES,
    Answer,
    Cancel,
    Cancelled,
    Command,
    Ended,
    Failed,
    Generate,
    GroupDone,
    GroupFailed,
    GroupGrown,
    Load,
    Loaded,
    Measure,
    Measured,
    Ready,
    Request,
    Said,
    frame,
)

START_TIMEOUT_S = 300.0
"""Importing torch takes 5 s of CPU, vLLM 15; a laptop that is busy or wakes a cold disk needs patience."""

ANSWER_TIMEOUT_S = 300.0
"""Between two answers: longer than any lease lives, and the largest policies are read from disk in this time."""

GRACE_S = 2.0
"""How long the child may take to leave after its input ended."""

R = TypeVar("R", Ready, Loaded, Measured)


Choose = Callable[[Path, bool, Mapping[str, str]], Choice]
"""Which engine to take for the policy in this folder, whether it must play episodes, and which are unfit, and why."""

log = logging.getLogger(__name__)


class EngineClient:
    """A handle on the engine child; make it with `open_engine`."""

    def __init__(self, command: Sequence[str] | Choose, log: IO[bytes] | int | None, answer_timeout_s: float) -> None:
        self._choose = command if callable(command) else None
        self._command = [] if callable(command) else list(command)
        self._log = log
        self._answer_timeout_s = answer_timeout_s
        self._process: trio.Process | None = None
        self._policy: Load | None = None
        self._turn, self._pipe = trio.Lock(), trio.Lock()
        self._unanswered: set[str] = set()
        self._early: deque[GroupGrown | GroupDone | GroupFailed] = deque()
        """Groups that grew or ended while another answer was awaited."""
        self.name = ""
        """Which engine was chosen; empty where none was to choose."""
        self._unfit: dict[str, str] = {}
        """Engines that could not load a policy that another could."""
        self.starts = 0
        """Children started so far: more than one means that the engine failed and was replaced."""

    @property
    def pid(self) -> int | None:
        """The child's process id while there is one."""
        return self._process.pid if self._process else None

    async def load(self, folder: Path, version: int, *, plays: bool = False) -> Loaded:
        """Load a policy folder, once all requests are answered; a replaced child starts from it, too."""
        async with self._turn:
            if self._choose is None:
                return await self._load(folder, version)
            failed: dict[str, str] = {}
            first: EngineFailed | None = None
            while True:
                try:
                    choice = self._choose(folder, plays, self._unfit | failed)
                except ConfigInvalid as error:
                    raise first or error from None
                await self._take(choice)
                try:
                    loaded = await self._load(folder, version)
                except EngineFailed as error:
                    log.warning("engine %s cannot load version %d: %s", choice.name, version, error)
                    failed[choice.name], first = f"it cannot load the policy ({error.message[:200]})", first or error
                else:
                    self._unfit |= failed
                    return loaded

    async def _take(self, choice: Choice) -> None:
        """Have the chosen engine from now on; one of another kind takes the place of the child."""
        if choice.command != self._command:
            log.info("engine %s", choice.why)
            await self.close()
            self._command = choice.command
        self.name = choice.name

    async def _load(self, folder: Path, version: int) -> Loaded:
        async with self._or_nothing():
            await self._start()
            policy = Load(folder=str(folder), version=version)
            loaded = await self._ask(policy, Loaded)
            self._policy = policy
            return loaded

    async def submit(self, requests: Sequence[Request]) -> None:
        """Add requests to those that are sampled; `finished` hands them over, in the order in which they end."""
        async with self._turn, self._or_nothing():
            if await self._start() and self._policy is not None:
                await self._ask(self._policy, Loaded)
            await self._send(Generate(requests=tuple(requests)))
            self._unanswered.update(request.request_id for request in requests)

    async def finished(self) -> GroupGrown | GroupDone | GroupFailed | None:
        """The next request that ends, or grew and asked to say so; None if there is none left that could."""
        async with self._turn, self._or_nothing():
            while self._unanswered and not self._early:
                self._note(await self._receive(self._answer_timeout_s))
            return self._early.popleft() if self._early else None

    async def cancel(self, request_ids: Collection[str]) -> None:
        """Give requests up, also while another task awaits them; one that has ended already is still handed over."""
        async with self._or_nothing():
            if self._unanswered.intersection(request_ids):
                await self._send(Cancel(request_ids=tuple(request_ids)))

    async def measured(self) -> Measured:
        """How fast the requests were sampled that have ended since this was last asked for."""
        async with self._turn, self._or_nothing():
            await self._start()
            return await self._ask(Measure(), Measured)

    async def rest(self) -> None:
        """End the child to free its memory, and give up what it was still asked for. The next load starts another."""
        async with self._turn:
            self._unanswered.clear()
            self._early.clear()
            await self.close()

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
            self._unanswered.clear()
            if self._process is not None:
                process, self._process = self._process, None
                await _kill(process)
            raise

    async def _start(self) -> bool:
        """Make sure of a child; true if it is a new one."""
        if self._process is not None and self._process.poll() is None:
            return False
        if self._process is not None and self._unanswered:
            raise await _gone(self._process)
        await self.close()
        if not self._command:
            raise EngineFailed("No policy is loaded.", hint="Load one before generating.")
        try:
            self._process = await trio.lowlevel.open_process(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log
            )
        except OSError as error:
            raise EngineFailed(
                f"The engine {self._command[0]} does not start: {error}.", hint="Install echo-swarm again."
            ) from error
        self.starts += 1
        self._expect(await self._receive(START_TIMEOUT_S), Ready)
        return True

    async def _ask(self, command: Load | Measure, kind: type[R]) -> R:
        """Send a command that has one answer; the groups that end before it are kept."""
        await self._send(command)
        while isinstance(answer := await self._receive(self._answer_timeout_s), GroupGrown | Ended):
            self._note(answer)
        return self._expect(answer, kind)

    def _note(self, answer: Said) -> None:
        """Keep a group for `finished`."""
        if isinstance(answer, GroupGrown) and answer.request_id in self._unanswered:
            self._early.append(answer)
            return
        if not isinstance(answer, Ended) or answer.request_id not in self._unanswered:
            raise EngineFailed(f"The engine answers {answer.kind} where the end of a request is due.")
        self._unanswered.remove(answer.request_id)
        if not isinstance(answer, Cancelled):
            self._early.append(answer)

    async def _send(self, body: Load | Generate | Cancel | Measure) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        with self._deadline(self._answer_timeout_s, "take a command"):
            try:
                async with self._pipe:
                    await process.stdin.send_all(frame(Command(body=body)))
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise await _gone(process) from error

    async def _receive(self, timeout_s: float) -> Said:
        with self._deadline(timeout_s, "answer"):
            size_bytes = int.from_bytes(await self._read(LENGTH_BYTES))
            if size_bytes > limits.MESSAGE_MAX_BYTES:
                raise EngineFailed(f"The engine announces a frame of {size_bytes} bytes.", hint="Another program?")
            return Answer.from_bytes(await self._read(size_bytes)).body

    async def _read(self, size_bytes: int) -> bytes:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        parts = bytearray()
        while len(parts) < size_bytes:
            try:
                part = await process.stdout.receive_some(size_bytes - len(parts))
            except trio.ClosedResourceError as error:  # `cancel` found it broken
                raise await _gone(process) from error
            if not part:
                raise await _gone(process)
            parts += part
        return bytes(parts)

    def _expect(self, reply: Said, kind: type[R]) -> R:
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


class _Reported(Exception):
    """The child itself said that the command failed: it is alive and in step."""

    def __init__(self, error: SwarmError) -> None:
        super().__init__(str(error))
        self.error = error


@asynccontextmanager
async def open_engine(
    command: Sequence[str] | Choose, *, log: IO[bytes] | int | None = None, answer_timeout_s: float = ANSWER_TIMEOUT_S
) -> AsyncIterator[EngineClient]:
    """An engine that ends with the block; the child starts with the first command, and logs to `log`."""
    client = EngineClient(command, log, answer_timeout_s)
    try:
        yield client
    finally:
        await client.close()


async def _gone(process: trio.Process) -> EngineFailed:
    """What to say of a child that ended, or is about to."""
    with trio.move_on_after(GRACE_S):
        await process.wait()
    code = process.returncode
    died = f"by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
    return EngineFailed(f"The engine ended {died}.", hint="It is started again; its log says more.")


async def _kill(process: trio.Process) -> None:
    """End a child at once and wait until it is gone, so that it leaves no zombie behind."""
    with trio.CancelScope(shield=True):
        process.kill()
        await process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                await pipe.aclose()
