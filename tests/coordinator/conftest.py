"""A fresh round for each test; those of the effects that count run on both databases."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.coordinator.world import World

ON_BOTH = ("test_leases", "test_intake", "test_batches", "test_appeals")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.module.__name__.rpartition(".")[2]
    if "world" in metafunc.fixturenames and name in ON_BOTH:
        metafunc.parametrize("world", ["sqlite", "postgresql"], indirect=True)


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """A round with S = 2, B = 2 and version 1 published."""
    url = request.getfixturevalue("postgres_url") if getattr(request, "param", "") == "postgresql" else ""
    made = World(tmp_path, postgres_url=url)
    made.publish(1, 0)
    yield made
    made.database.close()
