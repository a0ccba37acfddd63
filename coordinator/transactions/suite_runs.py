"""Runs of evaluation suites that are not ours: results of a version that the operator imported, as effects.

- The swarm did not compute these results and does not check them. Pages and replies name their suite.
- A run is recorded once, however often and in whichever form its file is imported: `SuiteRun.digest` identifies it.
- A version must have been published in this round. It need not be held by nodes any more.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import sqlalchemy as sa

from coordinator.store.rows import read_rows
from coordinator.store.tables import suite_runs, versions
from protocol import limits
from protocol.errors import NotFound
from protocol.policy import chunks

Suite = Literal["lm-eval", "inspect-ai", "lighteval"]


class SuiteRunRow(NamedTuple):
    """An imported run as it is stored."""

    number: int
    digest: str
    suite: str
    release: str
    version: int
    policy_update: int
    results: list[dict[str, Any]]
    imported_ms: int


@dataclass(frozen=True, slots=True)
class SuiteMetric:
    """The value of one metric of one task."""

    task: str
    metric: str
    value: float
    stderr: float | None = None
    """The standard error of the value; None if the suite does not report one."""
    samples: int | None = None
    """The number of samples that the value is computed from; None if the suite does not report it."""


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """One run of a suite, as its results file has it."""

    suite: Suite
    release: str
    """The suite's own version; "" if its file does not have it."""
    model: str
    run: str
    """The id or time that distinguishes the run from others with the same results."""
    metrics: tuple[SuiteMetric, ...]

    @property
    def digest(self) -> str:
        """Return the identity of the run, which does not depend on the form of its file."""
        return chunks.digest(json.dumps(asdict(self), sort_keys=True).encode())


@dataclass(frozen=True, slots=True)
class ImportedRun:
    """The outcome of an import."""

    number: int
    version: int
    is_new: bool
    """False if the same run was imported before; then `version` is that of the first import."""


def record(connection: sa.Connection, run: SuiteRun, version: int, *, now_ms: int) -> ImportedRun:
    """Record a run as a measurement of a version, unless it is recorded already."""
    digest = run.digest
    known = connection.execute(sa.select(suite_runs).where(suite_runs.c.digest == digest)).first()
    if known is not None:
        return ImportedRun(known.number, known.version, is_new=False)
    update = connection.execute(sa.select(versions.c.policy_update).where(versions.c.version == version)).scalar()
    if update is None:
        raise NotFound(
            f"Version {version} was not published in this round.", hint="`swarm-coordinator status` names the newest."
        )
    number = 1 + (connection.execute(sa.select(sa.func.max(suite_runs.c.number))).scalar() or 0)
    row = {"number": number, "digest": digest, "suite": run.suite, "release": run.release, "version": version}
    row |= {"policy_update": update, "results": [asdict(metric) for metric in run.metrics], "imported_ms": now_ms}
    connection.execute(sa.insert(suite_runs).values(row))
    return ImportedRun(number, version, is_new=True)


def remove(connection: sa.Connection, number: int) -> None:
    """Remove an imported run; its file can be imported again."""
    if not connection.execute(sa.delete(suite_runs).where(suite_runs.c.number == number)).rowcount:
        raise NotFound(f"No run {number} was imported.", hint="See `swarm-coordinator eval list --suites`.")


def list_runs(connection: sa.Connection, *, version: int = 0) -> list[dict[str, Any]]:
    """Return the newest imported runs, or those of a version, the oldest first."""
    query = sa.select(suite_runs).order_by(suite_runs.c.number.desc()).limit(limits.SUITE_RUNS_LISTED_MAX)
    if version:
        query = query.where(suite_runs.c.version == version)
    return [_listed(row) for row in reversed(read_rows(connection, query, SuiteRunRow))]


def one_run(connection: sa.Connection, number: int) -> dict[str, Any]:
    """Return an imported run by its number."""
    (row,) = read_rows(connection, sa.select(suite_runs).where(suite_runs.c.number == number), SuiteRunRow)
    return _listed(row)


def _listed(row: SuiteRunRow) -> dict[str, Any]:
    return {
        "number": row.number,
        "suite": row.suite,
        "release": row.release,
        "version": row.version,
        "update": row.policy_update,
        "imported_ms": row.imported_ms,
        "results": row.results,
    }
