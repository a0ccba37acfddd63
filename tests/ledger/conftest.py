"""Stores to test against: every store test runs on SQLite and on a real PostgreSQL."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine

from ledger import store
from ledger.tables import metadata
from tests.ledger.engines import sqlite_file, sqlite_memory

Connect = Callable[[], Engine]
"""Makes another engine on the same ledger."""


def connector(kind: str, request: pytest.FixtureRequest, folder: Path) -> Connect:
    if kind == "postgres":
        return partial(create_engine, request.getfixturevalue("postgres_url"))
    return sqlite_memory if kind == "memory" else partial(sqlite_file, folder / "ledger.sqlite")


@pytest.fixture(params=["file", "postgres"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Connect:
    """An empty ledger that several may open at once."""
    make = connector(request.param, request, tmp_path)
    _empty(made := make())
    made.dispose()
    return make


@pytest.fixture(params=["memory", "file", "postgres"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """An empty ledger."""
    made = connector(request.param, request, tmp_path)()
    _empty(made)
    yield made
    made.dispose()


def _empty(engine: Engine) -> None:
    with engine.begin() as conn:
        metadata.drop_all(conn)
        store.create(conn)
