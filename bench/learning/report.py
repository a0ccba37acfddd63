"""Reports of the trainings: a table, goals, and two plots for each task.

- A task *keeps* of its gain at S = 0 what its gain at another S is of that, by means over the seeds that both have.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from bench.harness import Bench
from bench.learning.cells import OBJECTIVES, Cell
from bench.learning.subjects import SUBJECTS, Subject
from coordinator.sim import report

KEPT = 0.9
"""The paper: up to S = 6, within a few per cent of synchronous training."""

NEAR = (3, 6)
"""Ages at which that is asked of the corrected objective."""


class Found:
    """The cells that are there."""

    def __init__(self, cells: Iterable[Cell]) -> None:
        self._cells = sorted(cells, key=lambda cell: (cell.staleness, cell.seed))

    def of(self, task: str, objective: str, staleness: int) -> list[Cell]:
        """Return the cell of each seed; without staleness the objectives are equal, and only one is trained."""
        said = "corrected" if staleness == 0 else objective
        return [cell for cell in self._cells if (cell.task, cell.objective, cell.staleness) == (task, said, staleness)]

    @property
    def ages(self) -> list[int]:
        return sorted({cell.staleness for cell in self._cells})


def judge(results: Found, bench: Bench) -> None:
    """The table, and what is asked of it."""
    for subject in SUBJECTS:
        for objective in OBJECTIVES:
            for age in results.ages:
                for cell in results.of(subject.name, objective, age):
                    name = f"{subject.name}, {objective}, S = {age}"
                    bench.measure(f"{name}: before", cell.before, unit=subject.unit)
                    bench.measure(f"{name}: after", cell.after, unit=subject.unit)
        _judge_one(subject, results, bench)


def _judge_one(subject: Subject, results: Found, bench: Bench) -> None:
    fresh = _gains(subject, results.of(subject.name, "corrected", 0))
    if not fresh:
        return
    bench.goal(f"{subject.name}: gain of the worst seed at S = 0", min(fresh.values()), at_least=subject.gain_wanted)
    for age in NEAR:
        aged = _gains(subject, results.of(subject.name, "corrected", age))
        if seeds := fresh.keys() & aged.keys():
            kept = sum(aged[seed] for seed in seeds) / sum(fresh[seed] for seed in seeds)
            bench.goal(f"{subject.name}: share of the gain kept at S = {age}", kept, at_least=KEPT)


def _gains(subject: Subject, cells: Sequence[Cell]) -> dict[int, float]:
    """Seed → gain."""
    return {cell.seed: subject.gain(cell.before, cell.after) for cell in cells}


def draw(results: Found, folder: Path) -> None:
    """A plot of each task's figure while it learns, and one of where it ends, against the age of its groups."""
    for subject in SUBJECTS:
        curves = {}
        for objective in OBJECTIVES:
            for age in results.ages:
                cells = results.of(subject.name, objective, age)
                if cells and (age > 0 or objective == "corrected"):
                    curves[f"{objective}, S = {age}"] = _mean_curve(cells)
        if curves:
            title = f"{subject.name}: {subject.figure}, in {subject.unit}, against updates (mean over seeds)"
            svg = report.lines(title, curves, right=subject.updates, top=subject.top)
            (folder / f"learning-{subject.name}.svg").write_text(svg)


def _mean_curve(cells: Sequence[Cell]) -> list[tuple[float, float]]:
    return [
        (float(points[0][0]), fmean(value for _, value in points))
        for points in zip(*(cell.curve for cell in cells), strict=True)
    ]
