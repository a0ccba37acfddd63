"""Turns per second of the environment side, by kind: a group's turns through the task process, as in a round.

- Each group plays in step until its episodes end or have had their turns; the policy says the same text each time.
- The same process plays with the sandbox and without, in turns. A third way is the environment alone, in this process:
  what it takes is the environment's own time.
- A kind whose library is not installed is left out by name. All kinds run with the interpreter that has the libraries,
  if there is one: `make bench-environments` does not install it, but `make test-environments` does.
"""

import asyncio
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from bench.harness import ROOT, serve
from coordinator.environments.host import EpisodeHost, TurnQuestion
from coordinator.tasks import reward_functions
from coordinator.tasks.kinds import ENVIRONMENTS
from coordinator.tasks.sandbox import Sandbox
from coordinator.tasks.task_pool import TaskPool
from coordinator.tasks.task_process import TaskProcessSpec
from protocol.errors import VerifierFailed
from protocol.tasks import ChatMessage, Problem

SAMPLES, TURNS_MAX = 16, 4
PROBLEMS = 64
WITH_LIBRARIES = ROOT / ".venv-environments" / "bin" / "python"
WAYS = ("sandbox", "no sandbox", "alone")
TIMEOUT_S = 120.0

OWN = '''
class Environment:
    """Counts what it is told."""

    def __init__(self, problem):
        self.total = self.turns = 0

    def step(self, turn):
        self.total += len(turn)
        self.turns += 1
        return None if self.turns == 4 else f"{self.total}>"

    def reward(self):
        return float(self.total)


def problems(split, seed):
    for number in range(1000):
        yield {"prompt": f"{number}>", "number": number}
'''
TRL_TASK = ROOT / "tests" / "environments" / "trl_task.py"
VAULT = ROOT / "tests" / "environments" / "vault_package"


def _call(name: str, **arguments: object) -> str:
    """Return the text of a call, as Qwen writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@dataclass(frozen=True)
class Kind:
    """A kind of environment: a name of `task.name` or a file, its parameters, and the text of each turn."""

    name: str
    task: str
    says: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    library: str = ""
    """The module without which there is no such kind."""
    network: bool = False
    readable: tuple[str, ...] = ()

    @property
    def is_there(self) -> bool:
        """Return True if its library is installed."""
        return not self.library or importlib.util.find_spec(self.library) is not None

    def places(self) -> tuple[str, str, Mapping[str, Any]]:
        """Return the places of its problems and of its class, and the parameters of both."""
        if self.task.endswith(".py"):
            return f"{self.task}:problems", f"{self.task}:Environment", self.parameters
        kind = ENVIRONMENTS[self.task]
        return kind.problems, kind.episode, {**self.parameters, **kind.parameters}

    def spec(self, *, sandboxed: bool) -> TaskProcessSpec:
        """Return the specification of its process."""
        _, episode, parameters = self.places()
        sandbox = Sandbox(network=self.network, listening=self.network, readable=self.readable) if sandboxed else None
        return TaskProcessSpec((), timeout_s=TIMEOUT_S, processes=1, environment=(episode, parameters), sandbox=sandbox)


def kinds(folder: Path) -> Iterator[Kind]:
    """Yield all kinds; `folder` gets the file of our own."""
    own = folder / "own.py"
    own.write_text(OWN)
    yield Kind("a file", str(own), "17")
    yield Kind("sokoban", "sokoban", "udlr", {"boxes": 1, "pulls": 4, "turns": 4, "moves": 4})
    yield Kind("kuhn", "kuhn", "call")
    yield Kind("tools", str(ROOT / "examples" / "tools.py"), _call("price", fruit="pear"))
    trl = {"factory": f"{TRL_TASK}:Shop", "data": f"{TRL_TASK}:problems"}
    yield Kind("trl", "trl", _call("buy", item="tea", price=1), trl, readable=(str(TRL_TASK.parent),))
    tries = {"generator": "chain_sum", "args": {"min_terms": 2, "max_terms": 2}, "tries": 4}
    yield Kind("reasoning-gym-tries", "reasoning-gym-tries", "<answer>x</answer>", tries, "reasoning_gym")
    talk = {"id": "vault", "args": {"prompted": False, "task": {"tool": False}}, "config": {"asks": 4}}
    yield Kind("verifiers", "verifiers", "Please open.", talk, "vault", network=True, readable=(str(VAULT),))
    yield Kind("textarena", "textarena", "[7]", {"id": "GuessTheNumber-v0"}, "textarena")


def problems(kind: Kind) -> list[Problem]:
    """Return the first problems of a kind."""
    place, _, parameters = kind.places()
    make = reward_functions.load_callable(place)
    rows = make("train", 7) if kind.task.endswith(".py") else make("train", 7, PROBLEMS, **parameters)
    return [_problem(json.loads(json.dumps(row))) for row in islice(rows, PROBLEMS)]


def _problem(row: Mapping[str, Any]) -> Problem:
    asked = row["prompt"]
    prompt = asked if isinstance(asked, str) else tuple(ChatMessage(each["role"], each["content"]) for each in asked)
    return Problem(prompt, str(row.get("answer") or ""), {name: row[name] for name in row if name != "prompt"})


class Episodes:
    """The episodes of a group: what to ask next, and whether they are over."""

    def __init__(self, key: str, problem: Problem, says: str) -> None:
        self._key, self._problem, self._says = key, problem, says
        self._turns: list[list[str] | None] = [[] for _ in range(SAMPLES)]
        self.played = 0
        """Turns of all samples so far."""

    def asked(self) -> TurnQuestion | None:
        """Return the next question; None if all episodes are over."""
        going = [turns for turns in self._turns if turns is not None]
        if not going:
            return None
        for turns in going:
            turns.append(self._says)
        self.played += len(going)
        is_last = len(going[0]) == TURNS_MAX
        return TurnQuestion(self._key, self._problem, self._turns, [is_last] * SAMPLES)

    def end(self, number: int) -> None:
        """Record that a sample's episode is over."""
        self._turns[number] = None


def alone(kind: Kind, seconds: float) -> float:
    """Return the turns per second of the environment in this process, from so many seconds and the group after them."""
    _, episode, parameters = kind.places()
    with closing(EpisodeHost(reward_functions.load_callable(episode), parameters)) as host:
        played, began = 0, time.perf_counter()
        for number, problem in enumerate(cycle(problems(kind))):
            if time.perf_counter() - began > seconds:
                break
            episodes = Episodes(str(number), problem, kind.says)
            while asked := episodes.asked():
                for sample, said in enumerate(host.play(asked)):
                    if said is None or said.earned is not None:
                        episodes.end(sample)
            played += episodes.played
        return played / (time.perf_counter() - began)


async def in_process(kind: Kind, seconds: float, *, sandboxed: bool) -> float:
    """Return the turns per second through a task process, without its start."""
    pool, groups = TaskPool(kind.spec(sandboxed=sandboxed)), problems(kind)
    try:
        await _play(pool, Episodes("start", groups[0], kind.says))
        played, began = 0, time.perf_counter()
        for number, problem in enumerate(cycle(groups)):
            if time.perf_counter() - began > seconds:
                break
            played += await _play(pool, Episodes(str(number), problem, kind.says))
        return played / (time.perf_counter() - began)
    finally:
        await pool.close()


async def _play(pool: TaskPool, episodes: Episodes) -> int:
    while asked := episodes.asked():
        for sample, answer in enumerate(await pool.play(asked)):
            if answer is None or answer.reward is not None:
                episodes.end(sample)
    return episodes.played


def turns_per_s(kind: Kind, way: str, seconds: float) -> float:
    """Return the turns per second of a kind in one of the ways."""
    if way == "alone":
        return alone(kind, seconds)
    return asyncio.run(in_process(kind, seconds, sandboxed=way == "sandbox"))


def interpreter() -> str:
    """Return the interpreter that has most libraries."""
    return str(WITH_LIBRARIES) if WITH_LIBRARIES.exists() else sys.executable


def main() -> None:
    """Answer the bench: the names of the kinds and whether each is there, or the turns per second of one."""
    with tempfile.TemporaryDirectory() as folder:
        known = {kind.name: kind for kind in kinds(Path(folder))}

        def work(asked: Mapping[str, Any]) -> Mapping[str, object]:
            if not asked:
                return {"kinds": {kind.name: kind.is_there for kind in known.values()}}
            try:
                return {"turns_per_s": turns_per_s(known[asked["kind"]], asked["way"], asked["seconds"])}
            except VerifierFailed as failure:
                return {"error": failure.message}

        serve(work)


if __name__ == "__main__":
    main()
