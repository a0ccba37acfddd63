"""Fixtures of the tests with real processes."""

import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.processes.programs import Swarm

MAKE_POLICY = """
import sys
from pathlib import Path
from coordinator.learner.embedded import EmbeddedShape, make_policy
make_policy(Path(sys.argv[1]), seed=1, shape=EmbeddedShape(*map(int, sys.argv[2:])))
"""


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny untrained policy in hub format, 40 kB."""
    return tiny_policy(tmp_path_factory.mktemp("policy") / "tiny")


@pytest.fixture(scope="session")
def large_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the policy a hundred times as large, 4.5 MB."""
    return _made(tmp_path_factory.mktemp("policy") / "large", hidden=128, layers=4, heads=4, intermediate=512)


def tiny_policy(folder: Path) -> Path:
    return _made(folder, hidden=16, layers=1, heads=2, intermediate=32)


def _made(folder: Path, *, hidden: int, layers: int, heads: int, intermediate: int) -> Path:
    """Make a policy in a process of its own, so that this one does not import torch."""
    shape = [str(number) for number in (hidden, layers, heads, intermediate)]
    subprocess.run([sys.executable, "-P", "-c", MAKE_POLICY, str(folder), *shape], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """The programs that the tests of a module share; none outlives the module."""
    made = Swarm(tmp_path_factory.mktemp("swarm"))
    yield made
    made.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure shows what the programs said last."""
    report = yield
    if report.failed:
        for swarm in Swarm.open:
            report.sections += [(f"end of {name}", text) for name, text in swarm.last_words() if text]
    return report
