"""Where metrics go beside the file, when asked: TensorBoard, and Weights & Biases.

- Either is an extra: a setting that needs one which is not installed is refused at the start, with the command.
- A run of Weights & Biases has the round's id as its own: a learner that resumes goes on in the same run. Where the
  service cannot be reached, or `WANDB_MODE=offline`, its package keeps the rows for `wandb sync`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coordinator.learner.tracking import AXES, Row, TrackingBoard
from protocol.errors import ConfigInvalid


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
