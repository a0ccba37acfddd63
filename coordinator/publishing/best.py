"""The best version so far, kept complete, and the result of every evaluation, as lines of JSON.

    evaluations.jsonl   a line for each evaluation, with every axis
    best/<version>/     the policy with the highest average, in hub format, and evaluation.json beside it

- Both are derived from the store: a missing one is made again, and a kill does not damage it.
- A version is still complete when its evaluation ends: until then its files are kept (`evaluations.oldest_needed`).
"""

import asyncio
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from coordinator.base.files import write_durably
from coordinator.store.state import Database
from coordinator.transactions import evaluations

FILE = "evaluation.json"


class Best:
    """The files of the evaluations of one round."""

    def __init__(self, folder: Path, database: Database, write_policy: Callable[[int, Path], int | None]) -> None:
        self._folder = folder
        self._database = database
        self._write_policy = write_policy
        self._seen = ""

    async def refresh(self) -> None:
        """Update the files if evaluations have changed since the last call."""
        rows, version = await self._database.read(_evaluated)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        if lines != self._seen:
            await asyncio.to_thread(self._keep, rows, version, lines)
            self._seen = lines

    def _keep(self, rows: Sequence[Mapping[str, Any]], version: int | None, lines: str) -> None:
        write_durably(self._folder / "evaluations.jsonl", lines.encode())
        if version is None or find_best(self._folder) == version:
            return
        best = self._folder / "best"
        target, beside = best / str(version), best / f"{version}.making"
        shutil.rmtree(beside, ignore_errors=True)
        if not target.exists():
            if self._write_policy(version, beside) is None:
                return  # its files were deleted: the earlier best version stays
            about = [row for row in rows if row["version"] == version]
            write_durably(beside / FILE, json.dumps(about, indent=2).encode())
            beside.rename(target)
        for other in best.iterdir():
            if other != target:
                shutil.rmtree(other)


def find_best(folder: Path) -> int | None:
    """Return the version that is kept as the best in a round's folder; None if there is none."""
    best = folder / "best"
    whole = [path for path in best.iterdir() if path.name.isdigit()] if best.is_dir() else []
    # There are two if a kill came between making the new one and deleting the old one.
    return int(max(whole, key=lambda path: path.stat().st_mtime_ns).name) if whole else None


def _evaluated(connection: sa.Connection) -> tuple[list[dict[str, Any]], int | None]:
    return evaluations.list_evaluations(connection), evaluations.best(connection)
