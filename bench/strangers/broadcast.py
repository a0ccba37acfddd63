"""Broadcasts beside free keys: the honest nodes' completion with attackers, against that without them.

- Real programs on loopback: a launched coordinator with its seeder, mirrors as honest nodes, and the crowd of
  `tests.processes.free_keys`. All figures of a cell come from one round, whose honest nodes stay.
- Time runs from a version's publication to the moment at which the last honest node holds it.
- `first` is the first version that meets the keys, `after` the median of those that follow, `newcomer` the fetch of a
  node that joins the round in which the keys are already.

    python -m bench.strangers.broadcast --kinds dead-40 silent-400 --honest 1 4
"""

import argparse
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from bench.harness import Bench, quick_from_environment
from bench.strangers.cells import Row
from protocol.limits import MIB
from tests.processes.free_keys import MODES, FreeKeys, Mode, free_keys
from tests.processes.programs import Program, Swarm, until
from tests.processes.rounds import Coordinator, Operator, Settings, held, mirror, operator_of, random_weights

SIZE_BYTES = 4 * MIB
HONEST = (1, 4, 16)
COUNTS = (40, 400)
BEATS_PER_S = 20.0
"""Heartbeats of all keys together: the machine is to be held up by their broadcasts, not by their requests."""

UNDISTURBED, AFTER = 5, 3
"""Versions."""

FIRST_GOAL, AFTER_GOAL = 1.5, 1.2

KINDS: dict[str, tuple[tuple[Mode, ...], int]] = {
    f"{name}-{count}": (modes, count)
    for count in COUNTS
    for name, modes in (*((mode, (mode,)) for mode in MODES), ("mixed", MODES))
}
"""Kinds of attack by name: the modes of the keys, and how many keys there are."""

SETTINGS: Settings = {
    "round": {"max_updates": 1000},
    "staleness": {"max_updates": 100},
    "publish": {"patches": False},
}


@dataclass
class Times:
    """Seconds of the versions of one cell."""

    undisturbed: list[float] = field(default_factory=list)
    first: float = 0.0
    after: list[float] = field(default_factory=list)
    newcomer_undisturbed: float = 0.0
    newcomer: float = 0.0


class Round:
    """A round and its honest nodes."""

    def __init__(self, swarm: Swarm, honest: int) -> None:
        self._swarm = swarm
        self.coordinator = Coordinator(swarm, SETTINGS).start()
        self._operator: Operator = operator_of(swarm, self.coordinator, self._weights())
        self._operator.publish()
        self._mirrors = [self._join(f"honest-{number}") for number in range(honest)]
        for program in self._mirrors:
            held(program, 1)

    def broadcast(self) -> float:
        """Publish one more version; seconds until the last honest node holds it."""
        self._operator.policy = self._weights()
        version = self._operator.publish()
        at_s = [float(held(program, version)["at_s"]) for program in self._mirrors]
        return max(at_s) - self._published_s(version)

    def newcomer(self, name: str) -> float:
        """Let one more node join, and leave again; the seconds of its first fetch."""
        program = self._join(name)
        seconds = float(program.said(r"version fetched version=\d+ seconds=([\d.]+)")[1])
        program.interrupt()
        return max(seconds, 0.01)

    def _join(self, name: str) -> Program:
        return mirror(self._swarm, name, self.coordinator.join_string, "--listen", "127.0.0.1:0")

    def _weights(self) -> Path:
        number = time.monotonic_ns()
        return random_weights(self._swarm.folder / f"weights-{number}", seed=number, size_bytes=SIZE_BYTES)

    def _published_s(self, version: int) -> float:
        store = self.coordinator.folder / "state.db"
        with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as connection:
            asked = "SELECT published_ms FROM versions WHERE version = ?"
            (published_ms,) = connection.execute(asked, (version,)).fetchone()
        return float(published_ms) / 1000


def rows(options: argparse.Namespace, *, quick: bool) -> Iterator[Row]:
    """Each cell, as many times as it is asked for."""
    usual = ["mixed-40"] if quick else list(KINDS)
    kinds = [kind for kind in KINDS if kind in options.kinds] if options.kinds else usual
    for _ in range(options.rounds):
        for honest, kind in product(options.honest, kinds):
            times, name = play(kind, honest), f"{honest} honest, {kind}"
            usual_s = median(times.undisturbed)
            yield Row(f"broadcast, first: {name}", usual_s, times.first, "s", at_most=FIRST_GOAL)
            yield Row(f"broadcast, after: {name}", usual_s, median(times.after), "s", at_most=AFTER_GOAL)
            yield Row(
                f"broadcast, newcomer: {name}", times.newcomer_undisturbed, times.newcomer, "s", at_most=FIRST_GOAL
            )


def play(kind: str, honest: int) -> Times:
    """Play a round: versions without attackers' keys, then with them."""
    modes, count = KINDS[kind]
    times = Times()
    with _swarm() as swarm:
        round_ = Round(swarm, honest)
        round_.broadcast()  # nobody was proven before the first
        time.sleep(SETTLE_S)  # the seeder reports every second whom it served, to nobody whom a bench could ask
        times.undisturbed = [round_.broadcast() for _ in range(UNDISTURBED)]
        times.newcomer_undisturbed = round_.newcomer("newcomer-0")
        round_.broadcast()  # the newcomer has left, and was still planned
        blobs = round_.coordinator.folder / "blobs"
        with free_keys(round_.coordinator.join_string, blobs, modes, count, beat_s=count / BEATS_PER_S) as keys:
            times.first = round_.broadcast()
            for _ in range(AFTER):
                _settled(keys)
                times.after.append(round_.broadcast())
            times.newcomer = round_.newcomer("newcomer-1")
    return times


SETTLE_S = 2.0
"""The time for the seeder's next word on whom it served."""


def _settled(keys: FreeKeys) -> None:
    """Wait until all keys have asked for the newest plan and sent what receipts they like."""
    newest = keys.newest
    until(f"all keys to follow version {newest}", lambda: keys.settled >= newest, within_s=600)


@contextmanager
def _swarm() -> Iterator[Swarm]:
    with TemporaryDirectory() as scratch:
        swarm = Swarm(Path(scratch) / "swarm")
        try:
            yield swarm
        finally:
            swarm.close()


def main() -> int:
    """Play every chosen cell, and judge."""
    quick = quick_from_environment()
    parser = argparse.ArgumentParser(prog="bench strangers broadcast", description=__doc__)
    parser.add_argument("--honest", nargs="*", type=int, default=[1] if quick else list(HONEST))
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=[])
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    bench = Bench("strangers-broadcast", inputs=vars(options))
    bounds = dict[str, float | None]()
    for row in rows(options, quick=bench.quick):
        print(f"{row.case}: {row.undisturbed:.2f} s undisturbed, {row.attacked:.2f} s attacked", flush=True)
        bench.measure(f"{row.case}, undisturbed", row.undisturbed, unit=row.unit)
        bench.measure(f"{row.case}, attacked", row.attacked, unit=row.unit)
        bounds[row.case] = row.at_most
    for case, at_most in bounds.items():
        ratio = bench.ratio(f"{case}, ratio", f"{case}, attacked", f"{case}, undisturbed")
        bench.goal(case, ratio, at_most=at_most)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
