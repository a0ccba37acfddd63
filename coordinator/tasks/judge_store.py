"""The file of a round's judge: the scores that are known, and the budget, which all task processes share.

- A score is kept by the hash of its request, so that the same completion is paid once.
- Every call counts when it begins, and its tokens when its answer is there.
- The limits are the settings of the reward, and what the operator has added since: the file keeps each addition.
"""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from protocol.errors import ConfigInvalid, VerifierDown

NAME = "judge.sqlite"

_TABLES = (
    "CREATE TABLE IF NOT EXISTS scores (request TEXT PRIMARY KEY, score REAL NOT NULL)",
    "CREATE TABLE IF NOT EXISTS spent (id INTEGER PRIMARY KEY, calls INTEGER, tokens INTEGER)",
    "CREATE TABLE IF NOT EXISTS added (id INTEGER PRIMARY KEY, calls INTEGER NOT NULL, tokens INTEGER NOT NULL)",
    "INSERT OR IGNORE INTO spent VALUES (1, 0, 0)",
)

_SPEND = """
UPDATE spent SET calls = calls + 1
WHERE (:calls = 0 OR calls < :calls + (SELECT coalesce(sum(calls), 0) FROM added))
AND (:tokens = 0 OR tokens < :tokens + (SELECT coalesce(sum(tokens), 0) FROM added))
"""


class JudgeBudget(NamedTuple):
    """Calls and tokens."""

    calls: int
    tokens: int


class JudgeStore:
    """The store in `folder`; without one, nothing is kept, and there is no budget."""

    def __init__(self, folder: str, limits: JudgeBudget = JudgeBudget(0, 0)) -> None:  # noqa: B008  # it is immutable
        if not folder and any(limits):
            raise ConfigInvalid(
                "A judge's budget needs a folder, since it holds for the whole round.", hint="Set SWARM_JUDGE_FOLDER."
            )
        self._limits = limits
        self._path = Path(folder) / NAME if folder else None
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with closing(self._open()) as connection, connection:
                for statement in _TABLES:
                    connection.execute(statement)

    @staticmethod
    def existing(folder: Path) -> "JudgeStore":
        """Open the store of a round whose judge has been asked before."""
        if not (folder / NAME).is_file():
            raise ConfigInvalid(
                f"{folder} has no {NAME}.", hint="Give the folder that the round has as SWARM_JUDGE_FOLDER."
            )
        return JudgeStore(str(folder))

    def find(self, key: str) -> float | None:
        """Return the score of a request that was answered before."""
        row = self._in_store(lambda one: one.execute("SELECT score FROM scores WHERE request = ?", (key,)).fetchone())
        return None if row is None else float(row[0])

    def keep(self, key: str, score: float) -> None:
        self._in_store(lambda one: one.execute("INSERT OR REPLACE INTO scores VALUES (?, ?)", (key, score)))

    def spend_call(self) -> None:
        """Count a call, or raise `VerifierDown` if the budget is used up."""
        if used_up := self._in_store(self._spend_call):
            spent, added = used_up
            parts = [
                f"{used:,} of {limit + more:,} {what}"
                for what, used, limit, more in zip(JudgeBudget._fields, spent, self._limits, added, strict=True)
                if limit
            ]
            raise VerifierDown(
                f"The judge's budget is used up: {', '.join(parts)}.",
                hint="Add to it with `swarm-coordinator task budget`: judging goes on within seconds. "
                "Or raise SWARM_JUDGE_CALLS_MAX or SWARM_JUDGE_TOKENS_MAX and launch again.",
            )

    def _spend_call(self, connection: sqlite3.Connection) -> tuple[JudgeBudget, JudgeBudget] | None:
        """Count a call; if the budget is used up, return what was spent and what was added when it was refused."""
        if connection.execute(_SPEND, self._limits._asdict()).rowcount:
            return None
        return _spent(connection), _added(connection)

    def spend_tokens(self, count: int) -> None:
        self._in_store(lambda one: one.execute("UPDATE spent SET tokens = tokens + ?", (min(count, 2**40),)))

    def add(self, more: JudgeBudget) -> None:
        """Add to the budget."""
        self._in_store(lambda one: one.execute("INSERT INTO added (calls, tokens) VALUES (?, ?)", more))

    def spent(self) -> JudgeBudget:
        return JudgeBudget(*self._in_store(_spent))

    def added(self) -> JudgeBudget:
        return JudgeBudget(*self._in_store(_added))

    def _in_store(self, work: Callable[[sqlite3.Connection], Any]) -> Any:
        """Return the result of `work` in one transaction; None without a folder."""
        if self._path is None:
            return None
        with closing(self._open()) as connection, connection:
            return work(connection)

    def _open(self) -> sqlite3.Connection:
        assert self._path is not None
        return sqlite3.connect(self._path, timeout=30.0)


def _spent(connection: sqlite3.Connection) -> JudgeBudget:
    return JudgeBudget(*connection.execute("SELECT calls, tokens FROM spent").fetchone())


def _added(connection: sqlite3.Connection) -> JudgeBudget:
    sums = "SELECT coalesce(sum(calls), 0), coalesce(sum(tokens), 0) FROM added"
    return JudgeBudget(*connection.execute(sums).fetchone())
