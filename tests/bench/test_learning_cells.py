"""The record of bench/learning: cells are trained once, whatever kills the run; and what is made of them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.harness import Bench
from bench.learning.cells import OBJECTIVES, Cell, append, ordered, recorded
from bench.learning.report import Found, draw, judge
from bench.learning.subjects import BY_NAME, SUBJECTS
from bench.learning.training import settings

CELL = Cell("leduc", 3, "plain", 0, 40, curve=((0, 2.3), (40, 1.5)), rewards=(0.1, 0.4), cpu_s=30.0)
UPDATES = {subject.name: subject.updates for subject in SUBJECTS}
WANTED = list(ordered(UPDATES, range(3), (0, 3, 6, 11)))


def test_what_is_recorded_is_found_and_what_was_torn_is_not(tmp_path: Path) -> None:
    path = tmp_path / "new" / "learning.jsonl"
    assert recorded(path) == {}
    append(path, CELL)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])  # killed in the middle of a line
    assert list(recorded(path).values()) == [CELL]
    other = replace(CELL, staleness=6)
    append(path, other)
    assert list(recorded(path).values()) == [CELL, other]


@pytest.mark.parametrize("line", ["", "[]", "7", "null", "{}", '{"curve": [[1]]}', '{"task": "leduc", "curve": []}'])
def test_a_line_that_is_no_cell_is_passed_over(tmp_path: Path, line: str) -> None:
    path = tmp_path / "learning.jsonl"
    path.write_text(line + "\n")
    assert recorded(path) == {}


def test_another_length_of_training_is_another_cell(tmp_path: Path) -> None:
    path = tmp_path / "learning.jsonl"
    append(path, CELL)
    assert replace(CELL, updates=120).name not in recorded(path)


def test_every_cell_comes_once_and_is_a_round_that_keeps_its_bound() -> None:
    assert len({cell.name for cell in WANTED}) == len(WANTED) == len(SUBJECTS) * 3 * (2 * 4 - 1)
    for cell in WANTED:
        config = settings(BY_NAME[cell.task], cell)
        assert (config.staleness.max_updates, config.staleness.kappa) == (cell.staleness, 1)
        assert (config.correction.mode == "none") == (cell.objective == "plain")
        assert config.round.seed == cell.seed


def test_whether_each_task_learns_is_known_before_anything_is_compared() -> None:
    first = WANTED[: len(SUBJECTS) * 3 * 2]
    assert {(cell.objective, cell.staleness) for cell in first} == {("corrected", 0), ("corrected", 3)}


def trained(task: str, objective: str, staleness: int, seed: int, after: float) -> Cell:
    begin = 2.4 if task == "leduc" else 20.0
    return Cell(task, staleness, objective, seed, 40, curve=((0, begin), (40, after)), rewards=(0.5,))


def verdict(cells: list[Cell], folder: Path) -> tuple[dict[str, bool], int]:
    bench = Bench("learning", inputs={}, results=folder, quick=False)
    judge(Found(cells), bench)
    status = bench.finish()
    goals = json.loads((folder / "learning.json").read_text())["goals"]
    return {name: goal["met"] for name, goal in goals.items()}, status


def test_a_figure_that_should_fall_gains_by_falling(tmp_path: Path) -> None:
    fell = [trained("leduc", "corrected", 0, seed, 1.2) for seed in range(3)]
    assert verdict(fell, tmp_path) == ({"leduc: gain of the worst seed at S = 0": True}, 0)
    rose = [*fell[:2], trained("leduc", "corrected", 0, 2, 2.6)]
    assert verdict(rose, tmp_path) == ({"leduc: gain of the worst seed at S = 0": False}, 1)


def test_a_gain_that_age_takes_away_is_told(tmp_path: Path) -> None:
    cells = [trained("arithmetic", "corrected", 0, 0, 70.0), trained("arithmetic", "corrected", 6, 0, 40.0)]
    met, status = verdict(cells, tmp_path)
    assert not met["arithmetic: share of the gain kept at S = 6"]
    assert status == 1


def test_a_seed_that_was_not_trained_at_an_age_says_nothing_about_it(tmp_path: Path) -> None:
    fresh = [trained("arithmetic", "corrected", 0, seed, after) for seed, after in ((0, 70.0), (1, 30.0))]
    met, _ = verdict([*fresh, trained("arithmetic", "corrected", 6, 0, 50.0)], tmp_path)
    assert not met["arithmetic: share of the gain kept at S = 6"]


def test_fresh_groups_are_the_same_for_both_objectives(tmp_path: Path) -> None:
    cells = [trained("sokoban", "corrected", 0, 0, 40.0), trained("sokoban", "plain", 11, 0, 20.0)]
    found = Found(cells)
    assert [found.of("sokoban", objective, 0) for objective in OBJECTIVES] == [cells[:1], cells[:1]]
    draw(found, tmp_path)
    (plot,) = tmp_path.iterdir()
    assert plot.name == "learning-sokoban.svg"
    assert "plain, S = 11" in plot.read_text()
