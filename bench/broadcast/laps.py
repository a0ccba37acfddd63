"""The laps that were run so far, in a file: a run that was stopped goes on where it was.

- One line per lap, appended and synced as the lap ends; half a line at the end, of a run that was killed, is cut off.
- A lap belongs to the cell with the very same rates and payload.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from bench.broadcast.cells import Cell
from bench.broadcast.contender import Outcome
from bench.broadcast.race import Lap
from bench.broadcast.timeline import Sample, Use


class Laps:
    """The laps of a run; without a path they are kept only in memory."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._laps: list[tuple[Cell, Lap]] = []
        if path is not None and path.exists():
            whole = path.read_bytes()
            whole = whole[: whole.rfind(b"\n") + 1]
            os.truncate(path, len(whole))
            self._laps = [_read(line) for line in whole.splitlines()]

    def of(self, cell: Cell, contenders: Sequence[str]) -> list[Lap]:
        """All laps of some contenders in one cell."""
        return [lap for of_cell, lap in self._laps if of_cell == cell and lap.contender in contenders]

    def add(self, cell: Cell, lap: Lap) -> None:
        """Save one more."""
        self._laps.append((cell, lap))
        if self._path is None:
            return
        plain = replace(lap.outcome, bytes_from=dict(lap.outcome.bytes_from))  # `asdict` spoils a Counter
        saved = {"cell": asdict(cell), "lap": asdict(replace(lap, outcome=plain))}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(saved) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _read(line: bytes) -> tuple[Cell, Lap]:
    saved = json.loads(line)
    lap = saved["lap"]
    samples = [
        Sample(**{**sample, "moved": {party: (sent, got) for party, (sent, got) in sample["moved"].items()}})
        for sample in lap["samples"]
    ]
    links = {party: (up, down) for party, (up, down) in lap["use"]["links"].items()}
    use = Use(links, lap["use"]["cores"])
    return Cell(**saved["cell"]), Lap(lap["contender"], Outcome(**lap["outcome"]), use, samples)
