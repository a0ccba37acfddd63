"""Fixtures of the tests that start a coordinator."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes.conftest import pytest_runtest_makereport, swarm

__all__ = ["policy", "pytest_runtest_makereport", "swarm"]

MAKE_POLICY = """
import sys
from pathlib import Path
from coordinator.learner.embedded import EmbeddedShape, make_policy
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.settings import TrainSettings
start, published = map(Path, sys.argv[1:])
make_policy(start, seed=1, shape=EmbeddedShape(hidden=16, layers=2, heads=2, intermediate=32))
TrainedPolicy(start, TrainSettings(learning_rate=1e-3)).writer.save_hub(published)
"""


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny policy as a learner publishes it, canary and all; made in a process of its own, which keeps torch out."""
    start, published = (tmp_path_factory.mktemp("policy") / name for name in ("start", "published"))
    made = [sys.executable, "-P", "-c", MAKE_POLICY, str(start), str(published)]
    subprocess.run(made, check=True, capture_output=True)
    return published
