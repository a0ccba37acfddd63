"""One tiny policy for all tests of the engine."""

from pathlib import Path

import pytest

from tests.tiny_policy import make_tiny_policy


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy folder; nobody changes it."""
    return make_tiny_policy(tmp_path_factory.mktemp("policy"))
