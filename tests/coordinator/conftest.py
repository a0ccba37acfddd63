"""A fresh round for each test; those of the effects that count run on both databases."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.coordinator.unsynced import unsynced_stores
from tests.coordinator.world import World

__all__ = ["unsynced_stores"]

ON_BOTH = (
    "test_appeals", "test_audits", "test_batches", "test_claims", "test_escrow", "test_leases", "test_logged_roots",
    "test_naming", "test_newcomers", "test_owners", "test_partial_rollouts", "test_parts", "test_payouts",
    "test_queries", "test_statements", "test_turns",
)  # fmt: skip
"""Modules whose tests are run on SQLite and on PostgreSQL."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.module.__name__.rpartition(".")[2]
    if "store_url" in metafunc.fixturenames and name in ON_BOTH:
        metafunc.parametrize("store_url", ["sqlite", "postgresql"], indirect=True)


@pytest.fixture
def store_url(request: pytest.FixtureRequest) -> str:
    """Return the URL of the database for a round's store; empty for a file in the test's folder."""
    return str(request.getfixturevalue("postgres_url")) if getattr(request, "param", "") == "postgresql" else ""


@pytest.fixture
def world(tmp_path: Path, store_url: str) -> Iterator[World]:
    """A round with S = 2, B = 2 and version 1 published."""
    made = World(tmp_path, postgres_url=store_url)
    made.publish(1, 0)
    yield made
    made.database.close()
