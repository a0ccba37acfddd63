"""An engine child, spoken to without an event loop: what is asked of it, and what it answers."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from protocol.work.rollout import Sample
from swarm_node.engine.messages import (
    LENGTH_BYTES,
    Answer,
    CancelRequests,
    Command,
    CommandFailed,
    Ended,
    EngineProgress,
    Generate,
    GroupDone,
    Loaded,
    LoadVersion,
    Measure,
    Ready,
    Said,
    SampleRequest,
    frame,
)

LEAVES_WITHIN_S = 120.0


class Child:
    """One process, for as long as the block lasts."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert isinstance(self.answer(), Ready)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        code = self._process.wait(LEAVES_WITHIN_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        assert code == 0, "it does not leave when its input ends"

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """End it as kill -9 does; the block must not end it again."""
        self._process.kill()
        self._process.communicate()

    def tell(self, *commands: LoadVersion | Generate | CancelRequests | Measure) -> None:
        assert self._process.stdin is not None
        for command in commands:
            self._process.stdin.write(frame(Command(body=command)))
        self._process.stdin.flush()

    def answer(self) -> Said:
        assert self._process.stdout is not None
        size_bytes = int.from_bytes(self._process.stdout.read(LENGTH_BYTES))
        return Answer.from_bytes(self._process.stdout.read(size_bytes)).body

    def load(self, folder: Path, version: int = 1) -> Loaded:
        answer = self.try_load(folder, version)
        assert isinstance(answer, Loaded), answer
        return answer

    def try_load(self, folder: Path, version: int = 1) -> Loaded | CommandFailed:
        self.tell(LoadVersion(folder=str(folder), version=version))
        answer = self.answer()
        assert isinstance(answer, Loaded | CommandFailed)
        return answer

    def ends(self, *requests: SampleRequest) -> list[Ended]:
        """Return how these requests end, in that order."""
        self.tell(Generate(requests=requests))
        return self.next_ends(len(requests))

    def next_ends(self, count: int) -> list[Ended]:
        """Return the next answers but `EngineProgress`, as far as they end a request."""
        answers: list[Said] = []
        while len(answers) < count:
            if not isinstance(answer := self.answer(), EngineProgress):
                answers.append(answer)
        return [answer for answer in answers if isinstance(answer, Ended)]

    def sample(self, *requests: SampleRequest) -> dict[str, tuple[Sample, ...]]:
        """The samples of every request."""
        ended = self.ends(*requests)
        groups = {group.request_id: group.samples for group in ended if isinstance(group, GroupDone)}
        assert groups.keys() == {request.request_id for request in requests}, ended
        return {request.request_id: groups[request.request_id] for request in requests}
