"""The metrics of every update as a line of JSON, and on the boards that the configuration names.

- Each line is complete and has every axis: update, version, samples, tokens, seconds and cost, the last four counted
  from the start of the round, waiting included. The cost is the credit of the groups, in the operator's unit.
- A learner that resumes makes some updates again: their lines are removed first, and also an incomplete line after a
  kill. So the file is the same as without the interruption.
- Each board (`coordinator.learner.boards`) gets the same row, and each evaluation once, with its samples if
  `learner.tracked_samples` asks for them. A board never delays the loop (`coordinator.learner.board_queue`).
"""

import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from coordinator.config import Config
from coordinator.learner.board_queue import QueuedBoard
from coordinator.learner.boards import COUNTED, Row, TrackingBoard, wanted_boards
from protocol.work.learning import Evaluated, EvaluationSamples

ReadSamples = Callable[[int, int], EvaluationSamples]
"""A function that returns samples of an evaluation, by its number and how many are wanted."""


class Tracker:
    """The metrics of one round, from an update on."""

    def __init__(
        self,
        folder: Path,
        *,
        update: int,
        boards: tuple[TrackingBoard, ...] = (),
        read_samples: ReadSamples | None = None,
        tracked_samples: int = 0,
    ) -> None:
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
        self._read_samples = read_samples if boards and tracked_samples else None
        self._tracked_samples = tracked_samples
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
                if self._read_samples is not None:
                    samples = self._read_samples(evaluation.number, self._tracked_samples)
                    for board in self._boards:
                        board.log_samples(samples)

    def close(self) -> None:
        """Write the file to disk, and close the boards, which may take `board_queue.CLOSE_S` each."""
        if self._file.closed:
            return
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


def open_tracker(config: Config, *, run_id: str, update: int, read_samples: ReadSamples) -> Tracker:
    """Return the tracker of a round from an update on, with the boards that the configuration names."""
    folder = config.round.directory / "learner"
    opening = wanted_boards(config, folder=folder, run_id=run_id, update=update)
    boards = tuple(QueuedBoard(name, open_board) for name, open_board in opening.items())
    count = config.learner.tracked_samples
    return Tracker(folder, update=update, boards=boards, read_samples=read_samples, tracked_samples=count)
