"""The metrics of every update as a line of JSON, and in TensorBoard and Weights & Biases if configured.

- Each line is complete and has every axis: update, version, samples, tokens, seconds and cost, the last four counted
  from the start of the round, waiting included. The cost is the credit of the groups, in the operator's unit.
- A learner that resumes makes some updates again: their lines are removed first, and also an incomplete line after a
  kill. So the file is the same as without the interruption.
- Each board gets the same row; if it has an earlier row of the same update, the later row counts.

TensorBoard and Weights & Biases:

- Either is an extra: if a setting needs one that is not installed, the start is refused with the command to install it.
- A run of Weights & Biases has the round's id: a learner that resumes continues the same run. If the service cannot be
  reached, or with `WANDB_MODE=offline`, its package keeps the rows for `wandb sync`.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from protocol.errors import ConfigInvalid
from protocol.work.learning import Evaluated

COUNTED = ("samples", "tokens", "seconds", "cost")
AXES = ("update", "version", *COUNTED)

Row = Mapping[str, float]


class TrackingBoard(Protocol):
    """A destination of rows beside the file."""

    def log(self, row: Row) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """The metrics of one round, from an update on."""

    def __init__(self, folder: Path, *, update: int, boards: tuple[TrackingBoard, ...] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        kept = [row for row in read(path) if row["update"] <= update]
        beside = path.with_name(path.name + ".new")
        beside.write_text("".join(json.dumps(row) + "\n" for row in kept))
        beside.replace(path)
        self._file = path.open("a", encoding="utf-8")
        self._total = {name: kept[-1].get(name, 0.0) if kept else 0.0 for name in COUNTED}
        self._last = time.monotonic()
        self._boards = boards
        self._measured = 0
        """The last evaluation that was sent to the boards."""

    def log(self, update: int, version: int, metrics: Row) -> None:
        """Record one update; its samples, tokens and cost are among the metrics."""
        now = time.monotonic()
        more = {**{name: metrics.get(name, 0.0) for name in COUNTED}, "seconds": now - self._last}
        self._last = now
        self._total = {name: self._total[name] + more[name] for name in COUNTED}
        row = {"update": update, "version": version, **metrics, **self._total}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for board in self._boards:
            board.log(row)

    def measured(self, evaluated: Iterable[Evaluated]) -> None:
        """Send evaluations to the boards, at the update of their version; the round has its own `evaluations.jsonl`."""
        for evaluation in evaluated:
            if evaluation.number > self._measured:
                self._measured = evaluation.number
                for board in self._boards:
                    board.log({"update": evaluation.update, **evaluation.figures})

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()
        for board in self._boards:
            board.close()


def read(path: Path) -> list[dict[str, float]]:
    """Return the whole lines of a file of metrics; none if there is no file."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def boards(folder: Path, *, update: int, tensorboard: bool, wandb: str, run: str) -> tuple[TrackingBoard, ...]:
    """Return the boards that the configuration names, from an update on."""

    def wanted() -> Iterator[TrackingBoard]:
        if tensorboard:
            yield TensorBoard(folder, update)
        if wandb:
            yield WeightsAndBiases(folder, project=wandb, run=run)

    return tuple(wanted())


class TensorBoard:
    """A scalar for every metric and axis, by update."""

    def __init__(self, folder: Path, update: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            raise _lacks("learner.tensorboard", "tensorboard") from None
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=update + 1)

    def log(self, row: Row) -> None:
        for name in row.keys() - {"update"}:
            self._writer.add_scalar(name, row[name], int(row["update"]))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run whose metrics can be drawn over any axis; by default over updates."""

    def __init__(self, folder: Path, *, project: str, run: str) -> None:
        try:
            import wandb
        except ModuleNotFoundError:
            raise _lacks("learner.wandb", "wandb") from None
        # The package must neither handle the learner's signals nor read its files.
        settings = wandb.Settings(console="off", disable_git=True, save_code=False, x_disable_meta=True, silent=True)
        self._run: Any = wandb.init(project=project, id=run, resume="allow", dir=str(folder), settings=settings)
        for axis in AXES:
            self._run.define_metric(axis, hidden=axis != "update")
        self._run.define_metric("*", step_metric="update")

    def log(self, row: Row) -> None:
        self._run.log(dict(row))

    def close(self) -> None:
        self._run.finish()


def _lacks(setting: str, extra: str) -> ConfigInvalid:
    return ConfigInvalid(f"{setting} needs a package that is not installed.", hint=f"pip install 'echo-swarm[{extra}]'")
