"""Boards: what they record, and that none of them stops, slows or betrays training."""

import json
import socket
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from coordinator.base.children import script
from coordinator.config import Config
from coordinator.learner import boards
from coordinator.learner.boards import COLUMNS, HIDDEN, Row, TrackingBoard, tracked_settings
from coordinator.learner.tracking import QueuedBoard, Tracker, open_tracker, read
from protocol.work.learning import Evaluated, EvaluationSample, EvaluationSamples

METRICS = {"samples": 4.0, "tokens": 10.0, "cost": 0.5, "loss": -0.5}
RUN = "a" * 16
HOSTILE = "<img src=x onerror=alert(1)> | `x`\n# y"


def read_samples(number: int, count: int) -> EvaluationSamples:
    samples = (
        EvaluationSample(problem=3, prompt="1+1=", completion="2", reward=1.0),
        EvaluationSample(problem=4, prompt="2+2=", completion=HOSTILE, reward=0.0),
    )
    return EvaluationSamples(number=number, version=number, update=number, split="held_out", samples=samples)


def configured(folder: Path, **learner: object) -> Config:
    return Config.model_validate({"round": {"directory": folder}, "learner": {"tracked_samples": 2, **learner}})


def train(config: Config, *, first: int, last: int) -> None:
    """Log updates and one evaluation as the loop does, from a start to an end."""
    tracker = open_tracker(config, run_id=RUN, update=first - 1, read_samples=read_samples)
    for update in range(first, last + 1):
        tracker.log(update, 7, METRICS | {"loss": -0.5 * update})
    tracker.measured([Evaluated(number=1, update=1, figures={"eval/held_out/avg@8": 0.25})])
    tracker.close()


class Obstructed:
    """A board that records what it gets, and obeys an event and a list of errors."""

    def __init__(self, *errors: Exception | None) -> None:
        self.rows: list[dict[str, float]] = []
        self.errors = list(errors)
        self.called, self.free = Event(), Event()
        self.free.set()
        self.closed = False

    def log(self, row: Row) -> None:
        self.called.set()
        self.free.wait()
        if self.errors and (error := self.errors.pop(0)):
            raise error
        self.rows.append(dict(row))

    def log_samples(self, samples: EvaluationSamples) -> None:
        raise AssertionError

    def close(self) -> None:
        self.closed = True


class TestQueue:
    def test_all_rows_arrive_in_order_before_the_board_is_closed(self) -> None:
        board = Obstructed()
        queued = QueuedBoard("b", lambda: board)
        for update in range(100):
            queued.log({"update": update})
        queued.close()
        assert [row["update"] for row in board.rows] == list(range(100))
        assert (board.closed, queued.dropped) == (True, 0)

    def test_a_board_that_hangs_costs_rows_and_no_time(self, caplog: pytest.LogCaptureFixture) -> None:
        board = Obstructed()
        board.free.clear()
        queued = QueuedBoard("b", lambda: board, queue_max=3, close_s=0.01)
        queued.log({"update": 0})
        assert board.called.wait(10)
        for update in range(1, 10):
            queued.log({"update": update})
        assert queued.dropped == 6, "one is being recorded, three wait"
        queued.close()
        assert queued.dropped == 9
        assert "board=b did not finish within 0.01 s" in caplog.text
        assert "board=b lacks 9 rows or tables" in caplog.text
        board.free.set()

    def test_an_error_costs_the_row_that_it_met_and_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        board = Obstructed(None, OSError("the disk is full\nand more"), None)
        queued = QueuedBoard("b", lambda: board)
        for update in range(3):
            queued.log({"update": update})
        queued.log_samples(read_samples(1, 2))
        queued.close()
        assert [row["update"] for row in board.rows] == [0, 2]
        assert queued.dropped == 2
        assert "board=b dropped 1 rows or tables so far: OSError: the disk is full\n" in caplog.text
        assert board.closed

    def test_a_board_that_cannot_be_opened_is_tried_again_and_misses_nothing(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        board, failures, opened = Obstructed(), [ConnectionError("refused"), ConnectionError("refused")], Event()

        def open_board() -> TrackingBoard:
            if failures:
                raise failures.pop()
            opened.set()
            return board

        queued = QueuedBoard("b", open_board, retry_s=0.01)
        queued.log({"update": 1})
        assert opened.wait(10)
        queued.close()
        assert board.rows == [{"update": 1}]
        assert caplog.text.count("cannot be opened") == 1

    def test_a_board_that_never_opens_does_not_hold_up_the_end(self) -> None:
        def open_board() -> TrackingBoard:
            raise ConnectionError("refused")

        queued = QueuedBoard("b", open_board, retry_s=3600)
        queued.log({"update": 1})
        queued.close()
        assert queued.dropped == 1

    def test_a_row_that_the_loop_changes_later_is_recorded_as_it_was(self) -> None:
        board = Obstructed()
        board.free.clear()
        queued = QueuedBoard("b", lambda: board)
        row = {"update": 1.0}
        queued.log(row)
        row["update"] = 2.0
        board.free.set()
        queued.close()
        assert board.rows == [{"update": 1.0}]


class TestSettings:
    def test_settings_have_their_names_and_values(self) -> None:
        settings = tracked_settings(Config.model_validate({"learner": {"algorithm": "dapo"}, "round": {"seed": 4}}))
        assert settings["learner.algorithm"] == "dapo"
        assert settings["round.seed"] == 4
        assert settings["learner.betas"] == "[0.9, 0.95]"
        assert "objective.beta" not in settings, "unset: the algorithm decides"

    def test_no_secret_is_among_them(self) -> None:
        config = Config.model_validate(
            {
                "task": {
                    "name": "my_task.py",
                    "parameters": {
                        "api_key": "s3cret-1",
                        "judge": {"token": "s3cret-2", "max_tokens": 50},
                        "url": "https://me:s3cret-3@host/v1",
                        "header": "Bearer s3cret-4",
                        "list": [{"password": "s3cret-5"}],
                        "model": "sk-s3cret-6",
                    },
                },
                "store": {"url": "postgresql://me:s3cret-7@host/db"},
                "payouts": {"evm_rpc": "https://rpc.example/s3cret-8"},
                "publish": {"origins": ["https://copy.example/s3cret-9"]},
            }
        )
        settings = tracked_settings(config)
        assert "s3cret" not in json.dumps(settings)
        assert settings["task.parameters.api_key"] == HIDDEN
        assert settings["task.parameters.judge.max_tokens"] == 50
        assert settings["sampling.max_new_tokens"] == 8, "its name is no secret's"


@pytest.fixture
def mlflow_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of the database that the learner makes, on its own."""
    mlflow = pytest.importorskip(
        "mlflow", reason="MLflow is an extra that is not installed; `make test-trackers` has it"
    )
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return lambda: mlflow.MlflowClient(f"sqlite:///{tmp_path / 'learner' / 'mlflow' / 'mlflow.db'}")


@pytest.mark.filterwarnings("ignore")  # MLflow and its store warn of what others deprecated
class TestMLflow:
    def test_a_run_has_metrics_settings_and_tables(self, tmp_path: Path, mlflow_client: Any) -> None:
        config = configured(tmp_path, mlflow="swarm", learning_rate=2e-5)
        many = {f"argument_{number}": number for number in range(boards.PARAMETERS_AT_ONCE)}
        config = Config.model_validate(config.model_dump() | {"task": {"parameters": many | {"long": "x" * 10_000}}})
        train(config, first=1, last=2)
        client = mlflow_client()
        experiment = client.get_experiment_by_name("swarm")
        (run,) = client.search_runs([experiment.experiment_id])
        history = client.get_metric_history(run.info.run_id, "loss")
        assert [(row.step, row.value) for row in history] == [(1, -0.5), (2, -1.0)]
        assert [row.step for row in client.get_metric_history(run.info.run_id, "eval/held_out/avg_at_8")] == [1]
        assert run.data.params["learner.learning_rate"] == "2e-05"
        assert run.data.params["task.parameters.argument_99"] == "99", "in the second request"
        assert run.data.params["task.parameters.long"] == "x" * boards.PARAMETER_MAX_CHARS
        assert (run.info.status, run.info.run_name) == ("FINISHED", RUN)
        assert json.loads(run.data.tags["mlflow.loggedArtifacts"]) == [
            {"path": "samples/evaluation-1.json", "type": "table"}
        ]
        (path,) = (tmp_path / "learner" / "mlflow" / "artifacts").rglob("evaluation-1.json")
        table = json.loads(path.read_text())
        assert table == {"columns": list(COLUMNS), "data": [[1, 3, "1+1=", "2", 1.0], [1, 4, "2+2=", HOSTILE, 0.0]]}

    def test_a_learner_that_resumes_continues_its_run(self, tmp_path: Path, mlflow_client: Any) -> None:
        train(configured(tmp_path, mlflow="swarm"), first=1, last=2)
        train(configured(tmp_path, mlflow="swarm", learning_rate=0.5), first=2, last=3)
        client = mlflow_client()
        (run,) = client.search_runs([client.get_experiment_by_name("swarm").experiment_id])
        assert {row.step for row in client.get_metric_history(run.info.run_id, "loss")} == {1, 2, 3}
        assert run.data.params["learner.learning_rate"] == "1e-06", "a parameter is of the first start"
        assert len(json.loads(run.data.tags["mlflow.loggedArtifacts"])) == 1

    def test_a_server_that_never_answers_stops_nothing(
        self, tmp_path: Path, mlflow_client: Any, monkeypatch: pytest.MonkeyPatch, silent_server: str
    ) -> None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", silent_server)
        opening = boards.wanted_boards(configured(tmp_path, mlflow="swarm"), folder=tmp_path, run_id=RUN, update=0)
        queued = QueuedBoard("mlflow", opening["mlflow"], close_s=0.1)
        tracker = Tracker(tmp_path, update=0, boards=(queued,))
        for update in range(1, 6):
            tracker.log(update, 1, METRICS)
        tracker.close()
        assert queued.dropped == 5
        assert [row["update"] for row in read(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]


@pytest.fixture
def silent_server() -> Iterator[str]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def trackio_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of Trackio's own data, which it reads when it is imported."""
    folder = tmp_path / "trackio"
    monkeypatch.setenv("TRACKIO_DIR", str(folder))
    for name in ("TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID"):
        monkeypatch.delenv(name, raising=False)
    pytest.importorskip("trackio", reason="Trackio is an extra that is not installed; `make test-trackers` has it")
    return folder


@pytest.mark.filterwarnings("ignore")  # Trackio warns of what others deprecated
class TestTrackio:
    def test_a_run_that_is_resumed_has_metrics_settings_and_tables(self, tmp_path: Path, trackio_folder: Path) -> None:
        train(configured(tmp_path, trackio="swarm", learning_rate=2e-5), first=1, last=2)
        train(configured(tmp_path, trackio="swarm"), first=2, last=3)
        with closing(sqlite3.connect(trackio_folder / "swarm.db")) as database:
            rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
            ((settings,),) = database.execute("SELECT config FROM configs").fetchall()
        assert {name for name, _, _ in rows} == {RUN}
        metrics = [(step, json.loads(text)) for _, step, text in rows]
        assert [(step, row["loss"]) for step, row in metrics if "loss" in row] == [
            (1, -0.5), (2, -1.0), (2, -1.0), (3, -1.5),
        ]  # fmt: skip
        tables = [(step, row["eval/held_out/samples"]) for step, row in metrics if "eval/held_out/samples" in row]
        step, table = tables[0]
        assert (step, table["_type"]) == (1, "trackio.table")
        assert table["_value"][0] == dict(zip(COLUMNS, (1, 3, "1+1=", "2", 1.0), strict=True))
        assert table["_value"][1]["completion"].startswith("&lt;img src=x"), "its page would show markup"
        assert "learner.learning_rate" in json.loads(settings)


@pytest.mark.processes
@pytest.mark.skipif(find_spec("trackio") is not None, reason="Trackio is installed here")
def test_a_launch_without_the_package_stops_before_it_makes_anything(tmp_path: Path) -> None:
    toml = tmp_path / "round.toml"
    toml.write_text(f'[round]\ndirectory = "{tmp_path / "round"}"\n[learner]\ntrackio = "swarm"\n')
    command = [script("swarm-coordinator"), "launch", str(toml)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "learner.trackio needs a package that is not installed." in done.stderr
    assert "pip install 'echo-swarm[trackio]'" in done.stderr
    assert not (tmp_path / "round").exists()
