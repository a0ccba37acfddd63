"""Metrics: a line an update, however often the learner was killed."""

import json
import struct
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from coordinator.config import Config
from coordinator.learner.boards import AXES, Row, require_installed
from coordinator.learner.tracking import Tracker, open_tracker, read
from protocol.errors import ConfigInvalid
from protocol.work.learning import Evaluated, EvaluationSample, EvaluationSamples

METRICS = {"samples": 4.0, "tokens": 10.0, "cost": 0.5, "loss": -0.5}

ONE = EvaluationSample(problem=3, prompt="1+1=", completion="2", reward=1.0)


def read_samples(number: int, count: int) -> EvaluationSamples:
    return EvaluationSamples(number=number, version=number, update=number, split="held_out", samples=(ONE,))


def configured(folder: Path, **learner: object) -> Config:
    return Config.model_validate({"round": {"directory": folder}, "learner": learner})


def test_every_update_has_a_line_with_all_axes(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, update=0)
    for update in (1, 2):
        tracker.log(update, 7, METRICS)
    tracker.close()
    first, second = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (first["update"], first["version"], first["loss"]) == (1, 7, -0.5)
    assert (second["samples"], second["tokens"], second["cost"]) == (8.0, 20.0, 1.0)
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


def test_a_file_of_before_costs_were_kept_can_be_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"update": 1, "samples": 4.0, "tokens": 9.0, "seconds": 2.0}\n')
    tracker = Tracker(tmp_path, update=1)
    tracker.log(2, 1, METRICS)
    tracker.close()
    assert read(tmp_path / "metrics.jsonl")[-1]["cost"] == 0.5


@pytest.mark.filterwarnings("ignore")  # TensorBoard warns of what others deprecated
def test_tensorboard_sees_the_same_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="TensorBoard is an extra that is not installed"
    )
    config = configured(tmp_path, tensorboard=True, tracked_samples=1, learning_rate=2e-5)
    tracker = open_tracker(config, run_id="", update=0, read_samples=read_samples)
    tracker.log(1, 7, METRICS)
    tracker.measured([Evaluated(number=1, update=1, figures={"eval/held_out/avg@8": 0.25})])
    tracker.close()
    events = accumulator.EventAccumulator(str(tmp_path / "learner" / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("eval/held_out/avg@8")] == [0.25]
    (settings,) = events.Tensors("settings/text_summary")
    assert b"| learner.learning&#95;rate | 2e-05 |" in settings.tensor_proto.string_val[0]
    (samples,) = events.Tensors("eval/held_out/samples/text_summary")
    assert samples.tensor_proto.string_val[0].splitlines() == [
        b"| version | problem | prompt | completion | reward |",
        b"| --- | --- | --- | --- | --- |",
        b"| 1 | 3 | 1&#43;1= | 2 | 1.0 |",
    ]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, -0.5)]
    assert [event.value for event in events.Scalars("cost")] == [0.5]


class Kept:
    """A board that remembers what it was told."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.samples: list[EvaluationSamples] = []

    def log(self, row: Row) -> None:
        self.rows.append(dict(row))

    def log_samples(self, samples: EvaluationSamples) -> None:
        self.samples.append(samples)

    def close(self) -> None:
        pass


def test_boards_are_told_of_each_evaluation_once_at_its_own_update(tmp_path: Path) -> None:
    """The evaluation ends later than its update; the file of updates has no line for it."""
    board = Kept()
    tracker = Tracker(tmp_path, update=0, boards=(board,), read_samples=read_samples, tracked_samples=1)
    first = Evaluated(number=1, update=0, figures={"eval/held_out/avg@8": 0.25})
    second = Evaluated(number=2, update=4, figures={"eval/held_out/avg@8": 0.5})
    tracker.measured([])
    tracker.measured([first])
    tracker.measured([first, second])
    tracker.close()
    assert board.rows == [{"update": 0, "eval/held_out/avg@8": 0.25}, {"update": 4, "eval/held_out/avg@8": 0.5}]
    assert read(tmp_path / "metrics.jsonl") == []
    assert [samples.number for samples in board.samples] == [1, 2]


def wandb_records(log: bytes) -> Iterator[bytes]:
    """The records of a short log of theirs: after a head, each has its checksum, length, and that it is whole."""
    place = 7
    while place < len(log):
        _, size, whole = struct.unpack_from("<IHB", log, place)
        assert whole == 1
        yield log[place + 7 : place + 7 + size]
        place += 7 + size


def test_weights_and_biases_is_told_the_same_numbers_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="Weights & Biases is an extra that is not installed")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    config = configured(tmp_path, wandb="swarm", tracked_samples=1)
    tracker = open_tracker(config, run_id="a" * 16, update=0, read_samples=read_samples)
    for update in (1, 2):
        tracker.log(update, 7, METRICS)
    tracker.close()
    (path,) = tmp_path.glob("learner/wandb/offline-run-*/run-*.wandb")
    rows, runs = [], []
    for record in map(Record.FromString, wandb_records(path.read_bytes())):
        if record.WhichOneof("record_type") == "history":
            rows.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item})
        if record.WhichOneof("record_type") == "run":
            runs.append((record.run.project, record.run.run_id))
    assert runs[0] == ("swarm", "a" * 16)
    assert [(row["update"], row["loss"], row["tokens"], row["cost"]) for row in rows] == [
        (1, -0.5, 10.0, 0.5),
        (2, -0.5, 20.0, 1.0),
    ]
    assert all(axis in rows[0] for axis in AXES)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_a_board_that_is_not_installed_is_refused_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # what an import of a missing package finds
    config = configured(tmp_path, **{name: True if name == "tensorboard" else "swarm"})
    opened = partial(open_tracker, run_id="a", update=0, read_samples=read_samples)
    for refused in (require_installed, opened):
        with pytest.raises(ConfigInvalid, match=rf"learner.{name} needs") as error:
            refused(config)
        assert f"echo-swarm[{name}]" in error.value.hint


def test_a_board_that_is_not_wanted_needs_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    require_installed(configured(tmp_path))


def test_without_the_setting_no_samples_are_read(tmp_path: Path) -> None:
    board = Kept()
    tracker = Tracker(tmp_path, update=0, boards=(board,), read_samples=read_samples)
    tracker.measured([Evaluated(number=1, update=0, figures={})])
    tracker.close()
    assert (len(board.rows), board.samples) == (1, [])
