"""The child's side of the protocol in `messages`: handles commands, sends answers, and runs steps of the engine.

- A command that cannot run yet waits, and later commands wait behind it; `CancelRequests` never waits.
- Every request is answered, whatever it does to the engine, and the engine works for the next request.
- While steps run, an answer is sent every second, so that a long group does not look like a hanging engine.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol

from protocol.errors import EngineFailed, SwarmError
from swarm_node.engine import policy_files
from swarm_node.engine.messages import (
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
    Said,
    SampleRequest,
    SamplingStats,
)

log = logging.getLogger(__name__)


PROGRESS_S = 1.0
"""Longest pause between two answers while steps run; far less than the agent's time-out."""


class AnyEngine(Protocol):
    """Interface of all engines: each holds a policy and samples from it, with our loop or its own."""

    @property
    def busy(self) -> bool:
        """True if there is something to sample."""

    def load(self, folder: Path, version: int) -> Loaded: ...

    def add(self, request: SampleRequest) -> None: ...

    def step(self) -> Sequence[GroupGrown | GroupDone | GroupFailed]: ...

    def cancel(self, request_ids: Collection[str]) -> list[str]: ...

    def measured(self) -> SamplingStats: ...


Waiting = LoadVersion | Generate | Measure | Encode
"""Commands that wait until earlier requests are answered."""


class Session:
    """Session of one engine with the agent."""

    def __init__(
        self,
        engine: AnyEngine,
        answer: Callable[[Said], None],
        limit_memory: Callable[[int], None] = lambda size_bytes: None,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._answer, self._limit_memory, self._now = engine, answer, limit_memory, now
        self._answered_at = now()
        self._folder: Path | None = None
        """Folder of the loaded policy."""
        self._waiting: deque[Waiting] = deque()
        self._unanswered: set[str] = set()
        """Requests in the engine."""

    @property
    def idle(self) -> bool:
        """True if there is nothing to do until the next command."""
        return not self._engine.busy and not self._waiting

    def handle(self, data: bytes) -> None:
        """Handle or queue a command."""
        try:
            command = Command.from_bytes(data).body
        except SwarmError as error:
            self._answer(CommandFailed.from_error(error))
            return
        if isinstance(command, CancelRequests):
            self._cancel(set(command.request_ids))
        else:
            self._waiting.append(command)

    def go_on(self) -> None:
        """Run the commands that can run, and take one step."""
        while self._waiting and (isinstance(self._waiting[0], Generate) or not self._engine.busy):
            self._obey(self._waiting.popleft())
        if self._engine.busy:
            self._step()

    def _obey(self, command: Waiting) -> None:
        try:
            match command:
                case Generate(requests=requests):
                    self._answered_at = self._now()
                    for request in requests:
                        self._add(request)
                case LoadVersion():
                    self._load(command)
                case Measure():
                    self._answer(self._engine.measured())
                case Encode(texts=texts):
                    self._answer(self._encode(texts))
        except SwarmError as error:
            log.warning("%s failed: %s", command.kind, error)
            self._answer(CommandFailed.from_error(error))

    def _load(self, command: LoadVersion) -> None:
        self._folder, folder = None, Path(command.folder)
        if command.memory_max_bytes:
            self._limit_memory(command.memory_max_bytes)
        loaded = self._engine.load(folder, command.version)
        self._folder = folder
        self._answer(loaded)

    def _encode(self, texts: Sequence[str]) -> Encoded:
        if self._folder is None:
            raise EngineFailed("No policy is loaded.", hint="Load a policy before encoding.")
        return Encoded(prompts=policy_files.encode(self._folder, texts))

    def _add(self, request: SampleRequest) -> None:
        try:
            self._engine.add(request)
            self._unanswered.add(request.request_id)
        except SwarmError as error:
            self._answer(GroupFailed.from_error(request.request_id, error))

    def _cancel(self, names: set[str]) -> None:
        waiting = [command for command in self._waiting if isinstance(command, Generate)]
        gone = {request.request_id for command in waiting for request in command.requests} & names
        self._waiting = deque(command for command in (_without(queued, names) for queued in self._waiting) if command)
        gone.update(self._engine.cancel(names))
        self._unanswered -= gone
        for name in sorted(gone):
            self._answer(Cancelled(request_id=name))

    def _step(self) -> None:
        try:
            ended: Sequence[GroupGrown | Ended] = self._engine.step()
        except Exception as error:  # every failure must be reported, and the next request may still succeed
            log.exception("a step failed")
            self._engine.cancel(self._unanswered)
            failure = EngineFailed(f"{type(error).__name__}: {error}"[:1000])
            ended = [GroupFailed.from_error(name, failure) for name in sorted(self._unanswered)]
        for group in ended:
            if not isinstance(group, GroupGrown):
                self._unanswered.discard(group.request_id)
            self._answer(group)
        now = self._now()
        if ended:
            self._answered_at = now
        elif now - self._answered_at >= PROGRESS_S:
            self._answered_at = now
            self._answer(EngineProgress())


def _without(command: Waiting, names: set[str]) -> Waiting | None:
    """Return the command without the requests in `names`; None if nothing is left."""
    if not isinstance(command, Generate):
        return command
    kept = tuple(request for request in command.requests if request.request_id not in names)
    return Generate(requests=kept) if kept else None
