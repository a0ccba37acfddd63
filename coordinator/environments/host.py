"""Episodes in an environment process: one instance for each sample, kept from turn to turn.

- A question has all turns of an episode so far. If the instance is not here (this process is new, or it was dropped to
  make room), the episode is played again from its first turn; so nothing is lost with a process. An instance that had
  other turns, which were never stored or belong to an abandoned try of the group, is dropped in the same way.
- An episode is over when the environment says so, or when the question says that no turn can follow.
- Coroutines of the samples of a group run at the same time.
"""

import asyncio
import hashlib
import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from coordinator.environments.interface import Earned, Environment, MakesEnvironment, Observation
from protocol.tasks import Problem

RUNNING_MAX = 4096
"""Instances that are kept; the one that was used longest ago is dropped first, and made again if it is needed."""


class Broken(Exception):
    """The environment did something that no environment may do."""


class TurnQuestion(NamedTuple):
    """The episodes of a group, and their turns so far."""

    key: str
    """The group: the same for all its questions."""
    problem: Problem
    turns: Sequence[Sequence[str] | None]
    """The turns of each sample; None if its episode ended before."""
    over: Sequence[bool]
    """True for a sample that can have no further turn."""


@dataclass(frozen=True)
class TurnReply:
    """An environment's answers to a sample's last turns."""

    read: tuple[Observation | None, ...]
    """The text to read after each turn that was played now: the last one, or all if the episode was replayed; None if
    the last turn ended the episode."""
    earned: Earned | None
    """The reward, if the episode is over."""


@dataclass
class _Running:
    """An instance, and the turns that it has had."""

    environment: Environment
    turns: int = 0
    had: bytes = b""
    """The digest of these turns."""

    def began(self, turns: Sequence[str], *, over: bool) -> bool:
        """Return True if these turns begin with those that the instance has had, and one is new unless `over`."""
        return self.turns <= len(turns) - (not over) and self.had == _digest(turns[: self.turns])


class EpisodeHost:
    """The running episodes of a process."""

    def __init__(
        self, make: MakesEnvironment, parameters: Mapping[str, Any], *, running_max: int = RUNNING_MAX
    ) -> None:
        self._make, self._parameters, self._running_max = make, dict(parameters), running_max
        self._running: OrderedDict[tuple[str, int], _Running] = OrderedDict()
        self._loop = asyncio.new_event_loop()

    def play(self, asked: TurnQuestion) -> list[TurnReply | None]:
        """Return the answers to the last turns of a group's samples, in their order."""
        return self._loop.run_until_complete(self._play(asked))

    def close(self) -> None:
        self._loop.close()

    async def _play(self, asked: TurnQuestion) -> list[TurnReply | None]:
        waiting = [
            self._answer(asked, number, turns) if turns is not None else _nothing()
            for number, turns in enumerate(asked.turns)
        ]
        return await asyncio.gather(*waiting)

    async def _answer(self, asked: TurnQuestion, number: int, turns: Sequence[str]) -> TurnReply:
        over, key = asked.over[number], (asked.key, number)
        running = self._running.pop(key, None)
        if running is None or not running.began(turns, over=over):
            running = _Running(self._make(asked.problem, **self._parameters))  # an answer that was lost is played again
        read = list[Observation | None]()
        for turn in turns[running.turns :]:
            running.turns += 1
            read.append(await _result(running.environment.step(turn)))
            if read[-1] is None and running.turns < len(turns):
                raise Broken("The episode ended at an earlier turn than before: a replay must answer the same.")
        if over or (read and read[-1] is None):
            return TurnReply(tuple(read), await _result(running.environment.reward()))
        running.had = _digest(turns)
        self._keep(key, running)
        return TurnReply(tuple(read), None)

    def _keep(self, key: tuple[str, int], running: _Running) -> None:
        self._running[key] = running
        while len(self._running) > self._running_max:
            self._running.popitem(last=False)


def _digest(turns: Sequence[str]) -> bytes:
    """Return a digest of turns, each with its length; a policy may write half of a surrogate pair."""
    hashed = hashlib.sha256()
    for turn in turns:
        data = turn.encode(errors="surrogatepass")
        hashed.update(len(data).to_bytes(8))
        hashed.update(data)
    return hashed.digest()


async def _nothing() -> None:
    return None


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
