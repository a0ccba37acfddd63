"""A rail against a bank that keeps its book on the disk, and pays each key once, as real ones do."""

import os
from collections.abc import Callable
from pathlib import Path

from coordinator.transactions.rails.base import Status, TransferBatch


class Bank:
    """Transfers, a line each; `step` hears of every moment at which a process could die."""

    def __init__(self, book: Path, step: Callable[[], None] = lambda: None, status: Status = Status.DONE) -> None:
        self._book = book
        self._step = step
        self._status = status

    @property
    def transfers(self) -> list[str]:
        return self._book.read_text().splitlines() if self._book.exists() else []

    def send(self, batch: TransferBatch) -> str:
        self._step()
        key = batch.key.hex()
        known = [line for line in self.transfers if line.startswith(key)]
        if not known:
            with self._book.open("a") as file:
                file.write(f"{key} {batch.amount_micros}\n")
                file.flush()
                os.fsync(file.fileno())
        self._step()
        return f"bank/{key[:16]}"

    def status(self, reference: str) -> Status:
        self._step()
        return self._status
