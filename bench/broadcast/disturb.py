"""The cost to other workers when one of N is killed, stalled or corrupting in the middle of a broadcast.

- The victim is the same worker in every round, and the undisturbed time is that of the same others.
- A killed worker and a corrupting one come back with new homes, so that no round knows of the one before.
"""

import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.broadcast.cells import Cell
from bench.broadcast.contender import Outcome, make_payload, workers_of
from bench.broadcast.net import Net
from bench.broadcast.ours import Ours
from bench.broadcast.race import links_of, patience_s, scratch

UNDISTURBED = "undisturbed"

MIDWAY = 0.4
"""The share of the bound at which the victim holds some chunks, and others wait for it."""


@dataclass(frozen=True)
class Disturbed:
    """A broadcast with its disturbance."""

    case: str
    outcome: Outcome
    """The outcome of the others."""
    lies: int
    """Chunks that the victim sent with a wrong byte."""


class Trial:
    """A swarm of ours with one victim."""

    def __init__(self, net: Net, cell: Cell, folder: Path) -> None:
        self._cell, self._folder = cell, folder
        *self._others, self._victim = workers_of(net)
        self.swarm = Ours(net, folder, corrupter=self._victim)
        self._payloads = 0

    def rounds(self, count: int) -> Iterator[Disturbed]:
        """Every case once per round."""
        for number in range(count):
            yield self._broadcast(UNDISTURBED)
            yield self._broadcast("stalled", lambda: self._signal(signal.SIGSTOP), lambda: self._signal(signal.SIGCONT))
            yield self._broadcast("corrupting", lambda: self._signal(signal.SIGUSR1))
            self._replace(f"{self._victim}-{number}-after-lies")
            yield self._broadcast("killed", self._kill)
            self._replace(f"{self._victim}-{number}-after-death")

    def _broadcast(
        self, case: str, hit: Callable[[], None] | None = None, cure: Callable[[], None] | None = None
    ) -> Disturbed:
        self._payloads += 1
        payload = make_payload(self._folder / f"payload-{self._payloads}", self._cell.size_bytes)
        began_at_s = self.swarm.publish(payload)
        delay_s = max(0.0, began_at_s + MIDWAY * self._cell.bound_s - time.time())
        timer = threading.Timer(delay_s, hit) if hit else None
        if timer:
            timer.start()
        outcome = self.swarm.outcome(payload, began_at_s, self._others, within_s=patience_s(self._cell))
        if timer:
            timer.join()
        if cure:
            cure()
        if hit is None or cure:
            self.swarm.held(self._victim, within_s=patience_s(self._cell))
        shutil.rmtree(payload.parent)
        lies = self.swarm.mirror(self._victim).said(lambda line: "lie" in line)
        return Disturbed(case, outcome, lies)

    def _signal(self, number: signal.Signals) -> None:
        self.swarm.mirror(self._victim).signal(number)

    def _kill(self) -> None:
        self.swarm.mirror(self._victim).kill()

    def _replace(self, home: str) -> None:
        """Another worker in the victim's place, up to date."""
        self.swarm.mirror(self._victim).end()
        self.swarm.start_mirror(self._victim, home=home)
        self.swarm.held(self._victim, within_s=patience_s(self._cell))


def disturb(cell: Cell, rounds: int) -> Iterator[Disturbed]:
    """Every disturbance of a cell, round by round."""
    with Net(links_of(cell)) as net, scratch() as folder, ExitStack() as running:
        trial = Trial(net, cell, folder)
        running.callback(trial.swarm.close)
        trial.swarm.start()
        yield from trial.rounds(rounds)
