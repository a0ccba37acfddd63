"""Stores to test against: every store test runs on each of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from ledger import store
from tests.ledger.engines import sqlite_file, sqlite_memory


@pytest.fixture(params=["memory", "file"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """An empty ledger."""
    made = sqlite_memory() if request.param == "memory" else sqlite_file(tmp_path / "ledger.sqlite")
    with made.begin() as conn:
        store.create(conn)
    yield made
    made.dispose()
