"""A tiny policy for all tests of the audit."""

from pathlib import Path

import pytest
import torch

from tests.tiny_policy import make_tiny_policy


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy folder; nobody changes it."""
    return make_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny matrices gain nothing from threads, and threads that wait for each other on a busy machine lose much."""
    torch.set_num_threads(1)
