"""A fresh round for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.coordinator.world import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A round with S = 2, B = 2 and version 1 published."""
    made = World(tmp_path)
    made.publish(1, 0)
    yield made
    made.database.close()
