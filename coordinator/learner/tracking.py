"""What became of every update, as a line of JSON, and for TensorBoard when asked.

- Each line stands by itself and has every axis: update, version, samples, tokens and seconds, all counted from the
  start of the round, waiting included.
- A learner that resumes makes some updates again: their lines are taken out first, and with them the half of a line
  that a kill left. So the file reads as if nothing had happened.
"""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

COUNTED = ("samples", "tokens", "seconds")


class Tracker:
    """The metrics of one round, from an update on."""

    def __init__(self, folder: Path, *, update: int, tensorboard: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        kept = [row for row in read(path) if row["update"] <= update]
        beside = path.with_name(path.name + ".new")
        beside.write_text("".join(json.dumps(row) + "\n" for row in kept))
        beside.replace(path)
        self._file = path.open("a", encoding="utf-8")
        self._total = {name: kept[-1][name] if kept else 0.0 for name in COUNTED}
        self._last = time.monotonic()
        self._board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=update + 1)

    def log(self, update: int, version: int, metrics: Mapping[str, float]) -> None:
        """One update; its samples and tokens are among the metrics."""
        now = time.monotonic()
        more = {"samples": metrics["samples"], "tokens": metrics["tokens"], "seconds": now - self._last}
        self._last = now
        self._total = {name: self._total[name] + more[name] for name in COUNTED}
        row = {"update": update, "version": version, **metrics, **self._total}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._board is not None:
            for name in row.keys() - {"update"}:
                self._board.add_scalar(name, row[name], update)
            self._board.flush()

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()
        if self._board is not None:
            self._board.close()


def read(path: Path) -> list[dict[str, float]]:
    """The whole lines of a file of metrics; none if there is no file."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]
