"""A queue in front of each board, so that no board can stop or slow training.

    log ─▶ queue, at most `QUEUE_MAX` ─▶ thread ─▶ open, log, log, …, close
             └ full: dropped                └ an error: dropped

- `log` and `log_samples` only append to the queue; the board's own thread opens the board and calls it.
- A board that cannot be opened is tried again every `RETRY_S`, while the queue fills. An error of a call drops what the
  call was to record. What is dropped is counted, and logged when the count reaches a power of two and at the end.
- `close` waits up to `CLOSE_S` for the rest. The thread is a daemon: a board that hangs does not keep the process.
- `metrics.jsonl` has every row, whatever happens here.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from threading import Condition, Thread

from coordinator.learner.boards import Open, Row, TrackingBoard
from protocol.work.learning import EvaluationSamples

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
