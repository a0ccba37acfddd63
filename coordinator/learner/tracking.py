"""The metrics of every update as a line of JSON, and on the boards that the configuration names.

- Each line is complete and has every axis: update, version, samples, tokens, seconds and cost, the last four counted
  from the start of the round, waiting included. The cost is the credit of the groups, in the operator's unit.
- A learner that resumes makes some updates again: their lines are removed first, and also an incomplete line after a
  kill. So the file is the same as without the interruption.
- Each board (`coordinator.learner.boards`) gets the same row, and each evaluation once, with its samples if
  `learner.tracked_samples` asks for them.

No board can stop or slow training, since each has a queue in front:

    log ─▶ queue, at most `QUEUE_MAX` ─▶ thread ─▶ open, log, log, …, close
             └ full: dropped                └ an error: dropped

- `log` and `log_samples` only append to the queue; the board's own thread opens the board and calls it.
- A board that cannot be opened is tried again every `RETRY_S`, while the queue fills. An error of a call drops what the
  call was to record. What is dropped is counted, and logged when the count reaches a power of two and at the end.
- `close` waits up to `CLOSE_S` for the rest. The thread is a daemon: a board that hangs does not keep the process.
"""

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Condition, Thread

from coordinator.config import Config
from coordinator.learner.boards import COUNTED, Open, Row, TrackingBoard, wanted_boards
from protocol.work.learning import Evaluated, EvaluationSamples

log = logging.getLogger(__name__)

QUEUE_MAX = 1000
"""The rows that wait for a board: hours of training, and a few megabytes."""

RETRY_S = 30.0
"""Seconds between two attempts to open a board."""

CLOSE_S = 30.0
"""The longest wait for a board at the end of the round, in seconds."""

Call = Callable[[TrackingBoard], None]


class QueuedBoard:
    """A board with a bounded queue and a thread of its own."""

    def __init__(
        self,
        name: str,
        open_board: Open,
        *,
        queue_max: int = QUEUE_MAX,
        retry_s: float = RETRY_S,
        close_s: float = CLOSE_S,
    ) -> None:
        self._name, self._open, self._retry_s, self._close_s = name, open_board, retry_s, close_s
        self._queue_max = queue_max
        self._changed = Condition()
        self._waiting: deque[Call] = deque()
        self._ending = False
        self.dropped = 0
        """The rows and tables that the board does not have."""
        self._thread = Thread(target=self._run, name=f"board {name}", daemon=True)
        self._thread.start()

    def log(self, row: Row) -> None:
        """Queue a row; return at once."""
        kept = dict(row)
        self._put(lambda board: board.log(kept))

    def log_samples(self, samples: EvaluationSamples) -> None:
        """Queue a table of samples; return at once."""
        self._put(lambda board: board.log_samples(samples))

    def close(self) -> None:
        """Wait for the rest of the queue, at most `close_s`, and log what the board does not have."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._thread.join(self._close_s)
        with self._changed:
            unfinished, self._waiting = len(self._waiting), deque()
            self.dropped += unfinished
        if self._thread.is_alive():
            log.warning("board=%s did not finish within %g s", self._name, self._close_s)
        if self.dropped:
            log.warning("board=%s lacks %d rows or tables; metrics.jsonl has all rows", self._name, self.dropped)

    def _put(self, call: Call) -> None:
        with self._changed:
            full = len(self._waiting) >= self._queue_max
            if not full:
                self._waiting.append(call)
                self._changed.notify_all()
        if full:
            self._drop("its queue is full")

    def _run(self) -> None:
        board = self._opened()
        while board is not None and (call := self._next()) is not None:
            self._attempt(call, board)
        if board is not None:
            try:
                board.close()
            except Exception as error:  # packages of others raise what they like
                log.warning("board=%s could not be closed: %s", self._name, _reason(error))

    def _opened(self) -> TrackingBoard | None:
        """Open the board, as often as it takes; return None if the round ends before."""
        failed = False
        while True:
            try:
                return self._open()
            except Exception as error:  # packages of others raise what they like
                if not failed:
                    log.warning(
                        "board=%s cannot be opened, and is tried again every %g s: %s",
                        self._name, self._retry_s, _reason(error),
                    )  # fmt: skip
                failed = True
            if self._ends_within(self._retry_s):
                return None

    def _ends_within(self, wait_s: float) -> bool:
        until = time.monotonic() + wait_s
        with self._changed:
            while not self._ending and (left_s := until - time.monotonic()) > 0:
                self._changed.wait(left_s)
            return self._ending

    def _next(self) -> Call | None:
        """Return what to record next, without its place in the queue; None at the end."""
        with self._changed:
            while not self._waiting and not self._ending:
                self._changed.wait()
            return self._waiting.popleft() if self._waiting else None

    def _attempt(self, call: Call, board: TrackingBoard) -> None:
        try:
            call(board)
        except Exception as error:  # packages of others raise what they like
            self._drop(_reason(error))

    def _drop(self, reason: str) -> None:
        """Count what is dropped, and log it ever more rarely."""
        with self._changed:
            self.dropped += 1
            dropped = self.dropped
        if dropped & (dropped - 1) == 0:
            log.warning("board=%s dropped %d rows or tables so far: %s", self._name, dropped, reason)


def _reason(error: Exception) -> str:
    """Return the first line of an error, which may be a page long."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"


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
        """Write the file to disk, and close the boards, which may take `CLOSE_S` each."""
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
