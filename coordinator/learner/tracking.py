"""What became of every update, as a line of JSON; for TensorBoard and Weights & Biases when asked.

- Each line stands by itself and has every axis: update, version, samples, tokens, seconds and cost, the last four
  counted from the start of the round, waiting included. The cost is what the groups were credited with, in the
  operator's unit.
- A learner that resumes makes some updates again: their lines are taken out first, and with them the half of a line
  that a kill left. So the file reads as if nothing had happened.
- Whoever else is told gets the same row; where it keeps what it was told of an update before, the later row counts.

TensorBoard and Weights & Biases:

- Either is an extra: a setting that needs one which is not installed is refused at the start, with the command.
- A run of Weights & Biases has the round's id as its own: a learner that resumes goes on in the same run. Where the
  service cannot be reached, or `WANDB_MODE=offline`, its package keeps the rows for `wandb sync`.
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
    """Where rows go beside the file."""

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
        """The last evaluation that the boards were told of."""

    def log(self, update: int, version: int, metrics: Row) -> None:
        """One update; its samples, tokens and cost are among the metrics."""
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
        """Tell the boards of evaluations, at the update of their version; `evaluations.jsonl` is the round's own."""
        for one in evaluated:
            if one.number > self._measured:
                self._measured = one.number
                for board in self._boards:
                    board.log({"update": one.update, **one.figures})

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()
        for board in self._boards:
            board.close()


def read(path: Path) -> list[dict[str, float]]:
    """The whole lines of a file of metrics; none if there is no file."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def boards(folder: Path, *, update: int, tensorboard: bool, wandb: str, run: str) -> tuple[TrackingBoard, ...]:
    """Those that the configuration names, from an update on."""

    def wanted() -> Iterator[TrackingBoard]:
        if tensorboard:
            yield TensorBoard(folder, update)
        if wandb:
            yield WeightsAndBiases(folder, project=wandb, run=run)

    return tuple(wanted())


class TensorBoard:
    """A scalar for every figure and axis, by update."""

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
    """A run whose figures can be drawn over any axis; over updates where nothing is chosen."""

    def __init__(self, folder: Path, *, project: str, run: str) -> None:
        try:
            import wandb
        except ModuleNotFoundError:
            raise _lacks("learner.wandb", "wandb") from None
        # What only watches must neither take signals from the learner nor read its files.
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
    return ConfigInvalid(f"{setting} needs a package of its own.", hint=f"pip install 'echo-swarm[{extra}]'")
