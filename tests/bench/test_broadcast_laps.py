"""Laps that were saved count for a later run; what a killed run left half-written does not."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

from bench.broadcast.cells import parse
from bench.broadcast.contender import Outcome
from bench.broadcast.laps import Laps
from bench.broadcast.race import Lap, race
from bench.broadcast.timeline import Sample, Use

CELL = parse("2:3:uniform", worker_mbit_s=20, size_bytes=1 << 20)
OTHER = parse("2:3:uniform", worker_mbit_s=10, size_bytes=1 << 20)


def lap(contender: str = "ours") -> Lap:
    sample = Sample(7.5, {"source": (1, 2)}, idle_s=1.0, total_s=2.0)
    return Lap(contender, Outcome(7.0, {"w1": 1.5}, 0, {"from_peers": 3}), Use({"source": (0.5, 0.25)}, 0.5), [sample])


def test_what_was_saved_is_read_again_and_belongs_to_its_cell(tmp_path: Path) -> None:
    Laps(tmp_path / "laps").add(CELL, lap())
    Laps(tmp_path / "laps").add(CELL, lap("libtorrent"))
    book = Laps(tmp_path / "laps")
    assert book.of(CELL, ["ours"]) == [lap()]
    assert book.of(CELL, ["ours", "libtorrent"]) == [lap(), lap("libtorrent")]
    assert book.of(OTHER, ["ours"]) == []


def test_a_lap_that_counted_its_bytes_is_saved_too(tmp_path: Path) -> None:
    counted = replace(lap(), outcome=replace(lap().outcome, bytes_from=Counter(from_peers=3)))
    Laps(tmp_path / "laps").add(CELL, counted)
    assert Laps(tmp_path / "laps").of(CELL, ["ours"]) == [counted]


def test_half_a_line_is_cut_off_before_the_next_is_written(tmp_path: Path) -> None:
    path = tmp_path / "laps"
    Laps(path).add(CELL, lap())
    path.write_bytes(path.read_bytes() + b'{"cell": {"wor')
    Laps(path).add(CELL, lap())
    assert Laps(path).of(CELL, ["ours"]) == [lap(), lap()]


def test_without_a_file_laps_last_as_long_as_the_run() -> None:
    book = Laps()
    book.add(CELL, lap())
    assert book.of(CELL, ["ours"]) == [lap()]


def test_who_has_run_every_round_is_not_started_again() -> None:
    assert list(race(CELL, ["ours", "libtorrent"], 3, {"ours": 3, "libtorrent": 4})) == []
