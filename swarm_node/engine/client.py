"""The agent's side of the engine: starts the child, exchanges messages with it, and replaces a failed one.

- Every wait has a deadline, and a child that misses it is killed.
- A crash, a hang or a broken frame ends the call with `EngineFailed`, and drops all unanswered requests. The next
  request starts a new child, which loads the last policy again.
- The engine may depend on the policy; another engine needs another child. If an engine cannot load a policy, the next
  one is tried. The engine is recorded as unfit once another one could load the policy: otherwise the policy is at
  fault.
- The child's memory is watched, with that of its workers: a child that uses more than the machine and its policy allow
  is killed (`memory`).
- The child has a process group of its own: Ctrl-C at the terminal reaches the agent alone, which ends the child.
- A call that is cancelled half-way ends the child, too: half a frame, or the answer to a cancelled command, must not
  be read as the answer to the next. `cancel` drops requests and keeps the child.
"""

import logging
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import trio

from protocol import limits
from protocol.errors import ConfigInvalid, EngineFailed, EngineNotStarted, SwarmError
from protocol.text.plain import size_text
from protocol.work.lease import float_class, is_exact
from swarm_node.base.waiting import first_of
from swarm_node.engine import memory
from swarm_node.engine.choose import Choice
from swarm_node.engine.messages import (
    LENGTH_BYTES,
    Answer,
    Cancelled,
    CancelRequests,
    Command,
    CommandFailed,
    Encode,
    Encoded,
    Ended,
    EngineProgress,
    Generate,
    GroupDone,
    GroupFailed,
    GroupGrown,
    Loaded,
    LoadVersion,
    Measure,
    Ready,
    Said,
    SampleRequest,
    SamplingStats,
    frame,
)
from swarm_node.machine import use

START_TIMEOUT_S = 300.0
"""Importing torch takes 5 s of CPU time, vLLM 15 s; a busy laptop or a cold disk takes longer."""

ANSWER_TIMEOUT_S = 300.0
"""The limit between two answers: the largest policies are read from disk in this time. While it samples, a child
reports progress every second, so that a group may take as long as its lease is valid."""

TEXTS_AT_ONCE = 16
"""Texts in one `Encode`: at `TOKENS_MAX` each, their tokens fit into a frame."""

GRACE_S = 2.0
"""Time for the child to exit after its input ended."""

NOTHING_SET: Mapping[str, str] = MappingProxyType({})

TOO_MUCH = "The version may be damaged. If other versions fail, too, this machine has too little memory."

R = TypeVar("R", Ready, Loaded, SamplingStats, Encoded)


Choose = Callable[[Mapping[str, str]], Choice]
"""Chooses an engine; the argument maps unfit engines to reasons."""

log = logging.getLogger(__name__)

EXACT_CLASS = (
    "This node computes in class %s. An auditor of this class judges its work to the bit. Any other auditor judges it "
    "by the tolerances of %s, and that is no fault. `swarm-node why LEASE` shows which."
)


class EngineClient:
    """Handle of the engine child; created by `open_engine`."""

    def __init__(
        self,
        command: Sequence[str] | Choose,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
        *,
        environment: Mapping[str, str] = NOTHING_SET,
        children: int = 1,
        cards: int = 1,
    ) -> None:
        self._choose = command if callable(command) else None
        self._command = [] if callable(command) else list(command)
        self._environment, self._children, self._cards = environment, children, cards
        self._answer_timeout_s = answer_timeout_s
        self._process: trio.Process | None = None
        self._policy: LoadVersion | None = None
        self._turn, self._pipe = trio.Lock(), trio.Lock()
        self._received = bytearray()
        """The first bytes of the child's next frame: a wait that is interrupted loses none of them."""
        self._unanswered: set[str] = set()
        self._early: deque[GroupGrown | GroupDone | GroupFailed] = deque()
        """Groups that grew or ended before the answer that was awaited."""
        self.name = ""
        """Name of the chosen engine; empty if the command is fixed."""
        self._unfit: dict[Choose, dict[str, str]] = {}
        """Engines that could not load a policy that another engine could load, by the choice that had them tried."""
        self._started = trio.Event()
        """Set while there may be a child to watch."""
        self._allowed_bytes = 0
        self._ended_for = ""
        """Reason why the watch killed the child; empty if it did not."""
        self._encoding = False
        """True while the child runs the policy's tokenizer for the agent."""
        self.starts = 0
        """Children started so far: more than one means that the engine failed and was replaced."""

    @property
    def pid(self) -> int | None:
        """The child's process id while there is one."""
        return self._process.pid if self._process else None

    async def load(self, folder: Path, version: int, choose: Choose | None = None) -> Loaded:
        """Load a policy folder, once all requests are answered; a replaced child loads it, too."""
        choose = choose or self._choose
        async with self._turn:
            if choose is None:
                return await self._load(folder, version)
            unfit = self._unfit.get(choose, {})
            failed: dict[str, str] = {}
            first: EngineFailed | None = None
            while True:
                try:
                    choice = choose(unfit | failed)
                except ConfigInvalid as error:
                    raise first or error from None
                await self._use(choice)
                try:
                    loaded = await self._load(folder, version)
                except EngineFailed as error:
                    log.warning("engine %s cannot load version %d: %s", choice.name, version, error)
                    failed[choice.name], first = f"it cannot load the policy ({error.message[:200]})", first or error
                else:
                    if failed:
                        self._unfit[choose] = unfit | failed
                    return loaded

    async def _use(self, choice: Choice) -> None:
        """Use the chosen engine from now on; end the child if it runs another engine."""
        if choice.command != self._command:
            log.info("starting engine %s", choice.why)
            await self.close()
            self._command = choice.command
        self.name = choice.name

    async def _load(self, folder: Path, version: int) -> Loaded:
        self._policy = None
        async with self._or_nothing():
            size_bytes = await trio.to_thread.run_sync(_size_bytes, folder)
            await self._start()
            self._allow(size_bytes)
            policy = LoadVersion(folder=str(folder), version=version, memory_max_bytes=self._allowed_bytes)
            loaded = await self._ask(policy, Loaded)
            self._policy = policy
            if loaded.rebuilt and is_exact(loaded.numerics):
                log.info(EXACT_CLASS, loaded.numerics, float_class(loaded.numerics))
            return loaded

    def _allow(self, policy_bytes: int) -> None:
        """Set the child's memory limit, by the size of the policy and its part of the free memory of this machine."""
        _, free_bytes = use.memory_bytes()
        free_bytes = None if free_bytes is None else free_bytes // self._children
        held_bytes = memory.tree_bytes(self.pid) if self.pid else 0
        self._allowed_bytes = memory.allowed_bytes(
            policy_bytes, free_bytes, held_bytes=held_bytes or 0, ranks=self._cards
        )

    async def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Add requests to the running ones; `finished` returns them in the order in which they end."""
        async with self._turn, self._or_nothing():
            if await self._start() and self._policy is not None:
                await self._ask(self._policy, Loaded)
            await self._send(Generate(requests=tuple(requests)))
            self._unanswered.update(request.request_id for request in requests)

    async def finished(self, interrupted: trio.Event | None = None) -> GroupGrown | GroupDone | GroupFailed | None:
        """Return the next request that ended, or that grew and asked for reports.

        Return None if no request is left, or if `interrupted` is set first.
        """
        async with self._turn, self._or_nothing():
            while self._unanswered and not self._early:
                if interrupted is None:
                    await self._receive_answer()
                elif interrupted.is_set():
                    return None
                else:
                    await first_of(self._receive_answer, interrupted.wait)
            return self._early.popleft() if self._early else None

    async def _receive_answer(self) -> None:
        """Receive one answer to a request."""
        self._note(await self._receive(self._answer_timeout_s))

    async def cancel(self, request_ids: Collection[str]) -> None:
        """Cancel requests, also while another task awaits them; a request that has already ended is still returned."""
        async with self._or_nothing():
            if self._unanswered.intersection(request_ids):
                await self._send(CancelRequests(request_ids=tuple(request_ids)))

    async def measured(self) -> SamplingStats:
        """Return the sampling statistics of the requests that ended since the last call."""
        async with self._turn, self._or_nothing():
            await self._start()
            return await self._ask(Measure(), SamplingStats)

    async def encoded(self, texts: Sequence[str]) -> list[bytes]:
        """Return the packed tokens of texts, by the tokenizer of the loaded policy."""
        async with self._turn, self._or_nothing():
            if await self._start() and self._policy is not None:
                await self._ask(self._policy, Loaded)
            prompts: list[bytes] = []
            for start in range(0, len(texts), TEXTS_AT_ONCE):
                asked = tuple(texts[start : start + TEXTS_AT_ONCE])
                self._encoding = True
                answer = await self._ask(Encode(texts=asked), Encoded)
                self._encoding = False
                if len(answer.prompts) != len(asked):
                    raise EngineFailed(f"The engine makes {len(answer.prompts)} prompts of {len(asked)} texts.")
                prompts += answer.prompts
            return prompts

    async def watch(self) -> None:
        """Kill the child whenever it uses more memory than allowed; runs until it is cancelled."""
        while True:
            await self._started.wait()
            process = self._process
            if process is None:
                self._started = trio.Event()
                continue
            used_bytes = await _memory_after_pause(process.pid)
            if used_bytes is not None and used_bytes > self._allowed_bytes > 0 and process is self._process:
                self._ended_for = (
                    f"The engine took {size_text(used_bytes)} of memory, "
                    f"and {size_text(self._allowed_bytes)} are allowed; it was stopped."
                )
                process.kill()

    async def rest(self) -> None:
        """End the child to free its memory, and drop its unanswered requests. The next load starts a new child."""
        async with self._turn:
            self._unanswered.clear()
            self._early.clear()
            await self.close()

    async def close(self) -> None:
        """End the child: close its input first, then kill it after `GRACE_S`."""
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
        """Kill the child on any error, unless the child itself reported the error."""
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
        """Start a child if none runs; return True if it is a new one."""
        if self._process is not None and self._process.poll() is None:
            return False
        if self._process is not None and self._unanswered:
            raise await self._gone(self._process)
        await self.close()
        if not self._command:
            raise EngineFailed("No policy is loaded.", hint="Load a policy before generating.")
        try:
            self._process = await trio.lowlevel.open_process(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | self._environment,
                process_group=0,
            )
        except OSError as error:
            raise EngineNotStarted(
                f"The engine {self._command[0]} does not start: {error}.", hint="Install echo-swarm again."
            ) from error
        self.starts += 1
        self._received.clear()
        self._ended_for, self._encoding = "", False
        self._started.set()
        self._expect(await self._receive(START_TIMEOUT_S), Ready)
        return True

    async def _ask(self, command: LoadVersion | Measure | Encode, kind: type[R]) -> R:
        """Send a command that has one answer; keep the groups that end before the answer."""
        await self._send(command)
        while isinstance(answer := await self._receive(self._answer_timeout_s), GroupGrown | EngineProgress | Ended):
            self._note(answer)
        return self._expect(answer, kind)

    def _note(self, answer: Said) -> None:
        """Keep a group for `finished`; ignore progress, which only shows that the child is alive."""
        if isinstance(answer, EngineProgress):
            return
        if isinstance(answer, GroupGrown) and answer.request_id in self._unanswered:
            self._early.append(answer)
            return
        if not isinstance(answer, Ended) or answer.request_id not in self._unanswered:
            raise EngineFailed(f"The engine answers {answer.kind} where the end of a request is due.")
        self._unanswered.remove(answer.request_id)
        if not isinstance(answer, Cancelled):
            self._early.append(answer)

    async def _send(self, body: LoadVersion | Generate | CancelRequests | Measure | Encode) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        with self._deadline(self._answer_timeout_s, "take a command"):
            try:
                async with self._pipe:
                    await process.stdin.send_all(frame(Command(body=body)))
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise await self._gone(process) from error

    async def _receive(self, timeout_s: float) -> Said:
        with self._deadline(timeout_s, "answer"):
            await self._read(LENGTH_BYTES)
            size_bytes = int.from_bytes(self._received[:LENGTH_BYTES])
            if size_bytes > limits.MESSAGE_MAX_BYTES:
                raise EngineFailed(f"The engine announces a frame of {size_bytes} bytes.", hint="Another program?")
            await self._read(LENGTH_BYTES + size_bytes)
        body = bytes(self._received[LENGTH_BYTES:])
        self._received.clear()
        return Answer.from_bytes(body).body

    async def _read(self, size_bytes: int) -> None:
        """Read until `size_bytes` of the next frame are received."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        while len(self._received) < size_bytes:
            try:
                part = await process.stdout.receive_some(size_bytes - len(self._received))
            except trio.ClosedResourceError as error:  # `cancel` detected that it is broken
                raise await self._gone(process) from error
            if not part:
                raise await self._gone(process)
            self._received += part

    def _expect(self, reply: Said, kind: type[R]) -> R:
        if isinstance(reply, CommandFailed):
            raise _Reported(SwarmError.from_wire(reply.model_dump()))
        if not isinstance(reply, kind):
            raise EngineFailed(f"The engine answers {reply.kind} where {kind.__name__} is due.")
        return reply

    async def _gone(self, process: trio.Process) -> EngineFailed:
        """Return the error for a child that ended, or is about to end."""
        with trio.move_on_after(GRACE_S):
            await process.wait()
        if self._ended_for:
            return EngineFailed(self._ended_for, hint=TOO_MUCH)
        code = process.returncode
        if code == -signal.SIGPROF:
            return EngineFailed("The policy's tokenizer took too long, and the engine was stopped.", hint=TOO_MUCH)
        if self._encoding and code == -signal.SIGABRT:  # `tokenizers` aborts this way when it gets no memory
            return EngineFailed("The policy's tokenizer took too much memory, and the engine ended.", hint=TOO_MUCH)
        if code == -signal.SIGABRT:
            said = "The engine ended by signal SIGABRT: it or the policy's tokenizer got no memory, or met a defect."
            return EngineFailed(said, hint=TOO_MUCH)
        died = f"by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        return EngineFailed(f"The engine ended {died}.", hint="It is started again; its log says more.")

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
    """Error that the child itself reported: the child is alive and ready."""

    def __init__(self, error: SwarmError) -> None:
        super().__init__(str(error))
        self.error = error


@asynccontextmanager
async def open_engine(
    command: Sequence[str] | Choose, *, answer_timeout_s: float = ANSWER_TIMEOUT_S
) -> AsyncIterator[EngineClient]:
    """Open an engine for the duration of the block; the child starts with the first command."""
    client = EngineClient(command, answer_timeout_s)
    failed: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.watch)
        try:
            yield client
        except Exception as error:  # raised below, outside of the nursery, which would wrap it
            failed = error
        finally:
            await client.close()
            nursery.cancel_scope.cancel()
    if failed is not None:
        raise failed


async def _memory_after_pause(pid: int) -> int | None:
    """Return the child's memory after the pause between two checks; None if it has ended."""
    if sys.platform == "linux":
        await trio.sleep(memory.LOOK_S)
        return memory.tree_bytes(pid)
    await trio.sleep(memory.LOOK_BY_PROGRAM_S)
    return await trio.to_thread.run_sync(memory.resident_bytes, pid)


def _size_bytes(folder: Path) -> int:
    """Return the size of a policy's files; 0 if there is no such folder, which the child reports."""
    try:
        return sum(file.stat().st_size for file in folder.iterdir())
    except OSError:
        return 0


async def _kill(process: trio.Process) -> None:
    """Kill a child and wait for its end, so that it leaves no zombie."""
    with trio.CancelScope(shield=True):
        process.kill()
        await process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                await pipe.aclose()
