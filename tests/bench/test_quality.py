"""The record of bench/quality.py: cells are trained once, whatever kills the run."""

from dataclasses import replace
from pathlib import Path

from bench.quality import OBJECTIVES, STALENESS, Cell, append, cells, recorded, settings

CELL = Cell(3, "plain", 0, 80, before=0.3, after=0.6, reward=0.5, worst=0.4)


def test_what_is_recorded_is_found_and_what_was_torn_is_not(tmp_path: Path) -> None:
    path = tmp_path / "new" / "quality.jsonl"
    assert recorded(path) == {}
    append(path, CELL)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])  # killed in the middle of a line
    assert list(recorded(path).values()) == [CELL]
    other = replace(CELL, staleness=6)
    append(path, other)
    assert list(recorded(path).values()) == [CELL, other]


def test_another_length_of_training_is_another_cell(tmp_path: Path) -> None:
    path = tmp_path / "quality.jsonl"
    append(path, CELL)
    assert replace(CELL, updates=120).name not in recorded(path)


def test_every_cell_comes_once_and_is_a_round_that_keeps_its_bound() -> None:
    wanted = list(cells(range(3), 80))
    assert len({cell.name for cell in wanted}) == len(wanted) == 3 * len(STALENESS) * len(OBJECTIVES)
    for cell in wanted:
        config = settings(cell)
        assert (config.staleness.max_updates, config.staleness.kappa) == (cell.staleness, 1)
        assert (config.correction.mode == "none") == (cell.objective == "plain")
