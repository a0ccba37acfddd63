"""SQLite stores that the tests' own process opens are not synced: no test cuts the power, and kills lose nothing.

Syncs take a quarter of the processor time, and half of the time on the clock, of tests that fill a store.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import sqlalchemy as sa
from sqlalchemy.pool import Pool

_as_programs: list[bool] = []
"""Not empty while stores are opened as programs do."""


def _unsync(connection: object, record: sa.pool.ConnectionPoolEntry, _: object) -> None:
    """Switch syncs off once for each connection, after the store's own pragmas."""
    if isinstance(connection, sqlite3.Connection) and "unsynced" not in record.info and not _as_programs:
        record.info["unsynced"] = True
        connection.execute("PRAGMA synchronous=OFF")


@pytest.fixture(autouse=True, scope="session")
def unsynced_stores() -> None:
    """Switch syncs off for this process; several folders of tests do so."""
    if not sa.event.contains(Pool, "checkout", _unsync):
        sa.event.listen(Pool, "checkout", _unsync)


@contextmanager
def synced() -> Iterator[None]:
    """Open stores as programs do."""
    _as_programs.append(True)
    yield
    _as_programs.pop()
