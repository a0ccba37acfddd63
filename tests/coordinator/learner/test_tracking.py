"""Metrics: a line an update, however often the learner was killed."""

import json
from pathlib import Path

import pytest

from coordinator.learner.tracking import Tracker, read

METRICS = {"samples": 4.0, "tokens": 10.0, "loss": -0.5}


def test_every_update_has_a_line_with_all_axes(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, update=0)
    for update in (1, 2):
        tracker.log(update, 7, METRICS)
    tracker.close()
    first, second = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (first["update"], first["version"], first["loss"]) == (1, 7, -0.5)
    assert (second["samples"], second["tokens"]) == (8.0, 20.0)
    assert second["seconds"] >= first["seconds"] >= 0


def test_updates_that_are_made_again_replace_their_lines(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, update=0)
    for update in (1, 2, 3):
        tracker.log(update, 1, METRICS)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"update": 4, "loss"')  # what a kill leaves
    tracker.close()
    resumed = Tracker(tmp_path, update=2)
    resumed.log(3, 2, METRICS)
    resumed.close()
    rows = read(tmp_path / "metrics.jsonl")
    assert [row["update"] for row in rows] == [1, 2, 3]
    assert rows[-1]["version"] == 2
    assert rows[-1]["tokens"] == 30.0


@pytest.mark.filterwarnings("ignore")  # TensorBoard warns of what others deprecated
def test_tensorboard_sees_the_same_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="TensorBoard is an extra that is not installed"
    )
    tracker = Tracker(tmp_path, update=0, tensorboard=True)
    tracker.log(1, 7, METRICS)
    tracker.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, -0.5)]
