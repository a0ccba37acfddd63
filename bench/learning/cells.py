"""Trainings of the bench: their settings, their results, and the file with the results.

- Cells are appended to a file as they are done: a run goes on where the last one stopped, and several may share it.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

LATELY = 0.25
"""The last part of a run, over which its reward is averaged."""

NEAR = 3
"""The age up to which both objectives are expected to learn alike."""

OBJECTIVES: dict[str, tuple[str, ...]] = {
    "corrected": (),
    "plain": ("correction.mode=none",),
}
"""The changes of each objective to an example's settings, which correct."""

Name = tuple[str, int, str, int, int]


@dataclass(frozen=True)
class Cell:
    """A training: the staleness of its groups, its objective, and its result."""

    task: str
    staleness: int
    objective: str
    seed: int
    updates: int
    curve: tuple[tuple[int, float], ...] = ()
    """Update → the task's figure."""
    rewards: tuple[float, ...] = ()
    """Mean of each batch."""
    cpu_s: float = 0.0

    @property
    def name(self) -> Name:
        return self.task, self.staleness, self.objective, self.seed, self.updates

    @property
    def before(self) -> float:
        return self.curve[0][1]

    @property
    def after(self) -> float:
        return self.curve[-1][1]

    @property
    def reward(self) -> float:
        """Mean over the last updates."""
        return fmean(self.rewards[int((1 - LATELY) * len(self.rewards)) :])


def ordered(updates: Mapping[str, int], seeds: Sequence[int], ages: Sequence[int]) -> Iterator[Cell]:
    """Yield cells, the most informative first: small staleness, then the cost of greater, corrected or not.

    Fresh groups need no correction: S = 0 is trained once, for both objectives.
    """
    near, far = [age for age in ages if age <= NEAR], [age for age in ages if age > NEAR]
    wanted = [("corrected", age) for age in near]
    wanted += [(objective, age) for age in reversed(far) for objective in ("plain", "corrected")]
    wanted += [("plain", age) for age in near if age > 0]
    for objective, age in wanted:
        for seed in seeds:
            for task, count in updates.items():
                yield Cell(task, age, objective, seed, count)


def recorded(path: Path) -> dict[Name, Cell]:
    """Return the results of earlier runs, without an incomplete line of a killed run."""
    results = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            said = json.loads(line)
            curve = tuple((int(update), float(value)) for update, value in said.pop("curve"))
            cell = Cell(**said | {"curve": curve, "rewards": tuple(said["rewards"])})
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        results[cell.name] = cell
    return results


def append(path: Path, cell: Cell) -> None:
    """A line more, on a line of its own whatever was there, and there for good."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = path.exists() and not path.read_bytes().endswith(b"\n")
    with path.open("a") as record:
        record.write(("\n" if torn else "") + json.dumps(asdict(cell)) + "\n")
        record.flush()
        os.fsync(record.fileno())
