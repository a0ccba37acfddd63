"""The boards that show metrics beside `metrics.jsonl`: TensorBoard, Weights & Biases, MLflow and Trackio.

    open ─▶ log a row of scalars, or a table of samples, any number of times ─▶ close

- Each package is an extra. `require_installed` refuses a setting whose package is missing, before training starts.
- A board gets the same rows as the file, the settings of the round, and the samples of each evaluation if
  `learner.tracked_samples` asks for them.
- Of the settings, only sections that decide what is trained leave the machine. Addresses, payments, stores and copies
  do not: their URLs may hold passwords or keys, and none of them changes a result. `task.parameters` and
  `data.template_arguments` are the operator's own tables. A value is hidden if its name is one that secrets have, if it
  looks like a known kind of key, or if it is a URL with a password.
- A learner that resumes continues the run with the same id, which is the beginning of the round's id. If the board has
  an earlier row of the same update, the later row counts.
- Completions come from nodes, so their text is untrusted: a board that would show it as HTML gets it escaped.
- The constructors may wait for a service or fail; `coordinator.learner.tracking` keeps that away from training.
"""

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from coordinator.config import Config
from protocol.errors import ConfigInvalid
from protocol.start import allow_left_out
from protocol.work.learning import EvaluationSamples

Setting = str | int | float | bool

SECTIONS = (
    "model",
    "task",
    "data",
    "reward",
    "episode",
    "selection",
    "sampling",
    "staleness",
    "learner",
    "objective",
    "correction",
    "eval",
)

OF_THE_ROUND = ("mode", "seed", "max_updates")
"""The settings of the section `round` that are included."""

SECRET_NAME = re.compile(r"(^|[_-])(api_?key|key|token|secret|password|passwd|credentials?|auth(orization)?)$", re.I)

SECRET_VALUE = re.compile(r"^(Bearer |sk-|hf_|gh[a-z]_|github_pat_|xox[a-z]-|AKIA)|://[^/@\s]*:[^/@\s]*@")

HIDDEN = "(hidden)"


def tracked_settings(config: Config) -> dict[str, Setting]:
    """Return the settings by their names, such as `learner.algorithm`; unset ones are left out."""
    table = config.model_dump(mode="json")
    chosen = {"round": {name: table["round"][name] for name in OF_THE_ROUND}}
    chosen |= {section: table[section] for section in SECTIONS}
    return dict(_flat(chosen, ""))


def _flat(table: Mapping[str, Any], before: str) -> Iterator[tuple[str, Setting]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        elif SECRET_NAME.search(name):
            yield before + name, HIDDEN
        elif value is not None:
            text = json.dumps(value) if isinstance(value, list) else value
            yield before + name, HIDDEN if _has_secret(value) else text


def _has_secret(value: Any) -> bool:
    """Return True if a value, or one inside it, looks like a secret."""
    if isinstance(value, list):
        return any(map(_has_secret, value))
    if isinstance(value, dict):
        return any(SECRET_NAME.search(name) or _has_secret(inner) for name, inner in value.items())
    return isinstance(value, str) and bool(SECRET_VALUE.search(value))


COUNTED = ("samples", "tokens", "seconds", "cost")
AXES = ("update", "version", *COUNTED)

COLUMNS = ("version", "problem", "prompt", "completion", "reward")
"""The columns of a table of samples."""

PARAMETERS_AT_ONCE = 100
"""The most parameters that MLflow accepts in one request."""

PARAMETER_MAX_CHARS = 6000
"""The longest value of a parameter that MLflow accepts."""

_MARKDOWN = {ord(mark): f"&#{ord(mark)};" for mark in "\\`*_{}[]()+!|~"} | {ord("\n"): " ↵ ", ord("\r"): " "}
"""The characters that are markup in a table in Markdown, and those that would end its row."""

Row = Mapping[str, float]


class TrackingBoard(Protocol):
    """A destination of metrics and samples beside the file."""

    def log(self, row: Row) -> None: ...

    def log_samples(self, samples: EvaluationSamples) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class TrackedRun:
    """The run that a board opens: its id, the learner's folder, the update to go on from, and the settings."""

    run_id: str
    folder: Path
    update: int
    settings: Mapping[str, Setting]


Open = Callable[[], TrackingBoard]


def require_installed(config: Config) -> None:
    """Refuse settings of boards whose packages are not installed here."""
    for name in _names(config):
        if find_spec(name) is None:
            raise ConfigInvalid(
                f"learner.{name} needs a package that is not installed.", hint=f"pip install 'echo-swarm[{name}]'"
            )


def _names(config: Config) -> list[str]:
    """Return the boards that the configuration names; each is called like its setting, its extra and its package."""
    return [name for name in ("tensorboard", "wandb", "mlflow", "trackio") if getattr(config.learner, name)]


def _import(name: str) -> None:
    """Import a board's package. Threads that import at once may see modules that are not complete."""
    try:
        import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
    except ImportError as error:
        raise ConfigInvalid(
            f"learner.{name}: the package is installed, but cannot be imported: {error}.",
            hint=f"pip install --force-reinstall 'echo-swarm[{name}]'",
        ) from error


def wanted_boards(config: Config, *, folder: Path, run_id: str, update: int) -> dict[str, Open]:
    """Return how to open each board that the configuration names, from an update on."""
    require_installed(config)
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # a learner reports to nobody but the named server
    allow_left_out()  # tensorboard and mlflow write to object stores with boto3
    for name in _names(config):
        _import(name)
    run = TrackedRun(run_id, folder, update, tracked_settings(config))
    learner = config.learner
    boards: dict[str, Open] = {}
    if learner.tensorboard:
        boards["tensorboard"] = lambda: TensorBoard(run)
    if learner.wandb:
        boards["wandb"] = lambda: WeightsAndBiases(run, learner.wandb)
    if learner.mlflow:
        boards["mlflow"] = lambda: MLflow(run, learner.mlflow)
    if learner.trackio:
        boards["trackio"] = lambda: Trackio(run, learner.trackio)
    return boards


class TensorBoard:
    """A scalar for every metric and axis, by update; settings and samples as text."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.update + 1)
        settings = [[name, json.dumps(value)] for name, value in run.settings.items()]
        self._writer.add_text("settings", _markdown(("setting", "value"), settings), run.update)
        self._writer.flush()

    def log(self, row: Row) -> None:
        for name in row.keys() - {"update"}:
            self._writer.add_scalar(name, row[name], int(row["update"]))
        self._writer.flush()

    def log_samples(self, samples: EvaluationSamples) -> None:
        self._writer.add_text(_table_name(samples), _markdown(COLUMNS, _cells(samples)), samples.update)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run whose metrics can be drawn over any axis; by default over updates."""

    def __init__(self, run: TrackedRun, project: str) -> None:
        import wandb

        # The package must neither handle the learner's signals nor read its files.
        settings = wandb.Settings(console="off", disable_git=True, save_code=False, x_disable_meta=True, silent=True)
        self._table = wandb.Table
        self._run: Any = wandb.init(
            project=project,
            id=run.run_id,
            resume="allow",
            dir=str(run.folder),
            settings=settings,
            config=dict(run.settings),
            allow_val_change=True,
        )
        for axis in AXES:
            self._run.define_metric(axis, hidden=axis != "update")
        self._run.define_metric("*", step_metric="update")

    def log(self, row: Row) -> None:
        self._run.log(dict(row))

    def log_samples(self, samples: EvaluationSamples) -> None:
        table = self._table(columns=list(COLUMNS), data=_cells(samples))
        self._run.log({"update": samples.update, _table_name(samples): table})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of an experiment: metrics by update, settings as parameters, samples as a table in `samples/`.

    `MLFLOW_TRACKING_URI` names the server. Without it the run is in the learner's folder, in an SQLite database.
    """

    def __init__(self, run: TrackedRun, experiment: str) -> None:
        from mlflow import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        address, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not address:
            home = run.folder / "mlflow"
            home.mkdir(parents=True, exist_ok=True)
            address, artifacts = f"sqlite:///{home.resolve() / 'mlflow.db'}", (home.resolve() / "artifacts").as_uri()
        self._client: Any = MlflowClient(tracking_uri=address)
        self._run_id = self._find_run(experiment, run.run_id, artifacts)
        self._log_settings(run.settings)

    def _find_run(self, experiment: str, run_id: str, artifacts: str | None) -> str:
        """Return the run of this round, which may be from before a restart; its own ids cannot be chosen."""
        found = self._client.get_experiment_by_name(experiment)
        place = found.experiment_id if found else self._client.create_experiment(experiment, artifacts)
        runs = self._client.search_runs([place], filter_string=f"tags.`echo_swarm.round` = '{run_id}'", max_results=1)
        if runs:
            self._client.set_terminated(runs[0].info.run_id, status="RUNNING")
            return str(runs[0].info.run_id)
        made = self._client.create_run(place, run_name=run_id, tags={"echo_swarm.round": run_id})
        return str(made.info.run_id)

    def _log_settings(self, settings: Mapping[str, Setting]) -> None:
        """Record the settings as parameters. A parameter never changes: the values of the first start stay."""
        from mlflow.entities import Param

        known = self._client.get_run(self._run_id).data.params
        new = [Param(name, str(value)[:PARAMETER_MAX_CHARS]) for name, value in settings.items() if name not in known]
        for start in range(0, len(new), PARAMETERS_AT_ONCE):
            self._client.log_batch(self._run_id, params=new[start : start + PARAMETERS_AT_ONCE])

    def log(self, row: Row) -> None:
        from mlflow.entities import Metric

        now_ms, update = int(time.time() * 1000), int(row["update"])
        metrics = [Metric(_mlflow_name(name), value, now_ms, update) for name, value in row.items() if name != "update"]
        self._client.log_batch(self._run_id, metrics=metrics)

    def log_samples(self, samples: EvaluationSamples) -> None:
        # MLflow's own `log_table` needs pandas; its page reads this form, by the tag, from any JSON file.
        name = f"samples/evaluation-{samples.number}.json"
        text = json.dumps({"columns": list(COLUMNS), "data": _cells(samples)})
        self._client.log_text(self._run_id, text, name)
        tags = self._client.get_run(self._run_id).data.tags
        tables = json.loads(tags.get("mlflow.loggedArtifacts", "[]"))
        if {"path": name, "type": "table"} not in tables:
            tables.append({"path": name, "type": "table"})
            self._client.set_tag(self._run_id, "mlflow.loggedArtifacts", json.dumps(tables))

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class Trackio:
    """A run of a project: metrics by update, settings as its configuration, samples as tables.

    Trackio's own variables say where it is: `TRACKIO_DIR`, `TRACKIO_SERVER_URL` or `TRACKIO_SPACE_ID`.
    """

    def __init__(self, run: TrackedRun, project: str) -> None:
        import trackio

        self._table = trackio.Table
        self._run: Any = trackio.init(
            project,
            name=run.run_id,
            config=dict(run.settings),
            resume="allow",
            embed=False,
            private=True,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, row: Row) -> None:
        self._run.log({name: value for name, value in row.items() if name != "update"}, step=int(row["update"]))

    def log_samples(self, samples: EvaluationSamples) -> None:
        cells = [[escape(cell) if isinstance(cell, str) else cell for cell in row] for row in _cells(samples)]
        self._run.log({_table_name(samples): self._table(list(COLUMNS), cells)}, step=samples.update)

    def close(self) -> None:
        self._run.finish()


def _cells(samples: EvaluationSamples) -> list[list[Any]]:
    return [
        [samples.version, sample.problem, sample.prompt, sample.completion, sample.reward] for sample in samples.samples
    ]


def _table_name(samples: EvaluationSamples) -> str:
    return f"eval/{samples.split}/samples"


def _markdown(columns: tuple[str, ...], rows: list[list[Any]]) -> str:
    """Return a table in Markdown, in which no cell is markup."""
    lines = [columns, ["---"] * len(columns), *(map(_markdown_cell, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _markdown_cell(value: Any) -> str:
    return escape(str(value)).translate(_MARKDOWN)


def _mlflow_name(name: str) -> str:
    """Return the name of a metric without characters that MLflow refuses: `avg@8` is `avg_at_8`."""
    plain = name.replace("@", "_at_")
    return "".join(letter if letter.isalnum() or letter in "_-./ " else "_" for letter in plain)
