"""Fixtures of all tests: untimed properties, since a busy machine is no counterexample; a PostgreSQL; a tiny disk."""

import gc
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings

from tests.ledger import postgres

# Before torch is imported, here and in the programs that tests start. Workers share the processors, and threads of
# OpenMP wait for each other by spinning: on two busy cores, two threads took 13.4 s of CPU time for the check of
# SmolLM2 that `VersionScorer` begins with, and one took 1.5 s. Where a test is about several threads, they wait asleep.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

gc.disable()  # until the tests are collected: a collection of garbage searches every module and test made before it

settings.register_profile("house", deadline=None, print_blob=True)
settings.load_profile("house")


LONGEST = (
    "tests/installers/test_install_sh.py",
    "tests/coordinator/learner/test_preflight.py",
    "tests/coordinator/learner/test_ranks.py",
    "tests/processes/test_demo.py",
    "tests/architectures/test_matrix.py",
    "tests/installers/test_running_agents.py",
    "tests/swarm_node/engine/test_hostile_tokenizers.py",
    "tests/coordinator/audit/test_auditor.py",
    "tests/real/test_canary.py",
    "tests/coordinator/config/test_examples.py",
)
"""Files that take long, the longest first: by `pytest FILE --durations=0`, one file at a time."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, then those that start programs: of the last file, one worker alone is busy."""
    top = Path(__file__).parents[1]
    places = {top / name: place for place, name in enumerate(LONGEST)}
    slow = {item.path for item in items if item.get_closest_marker("processes")}
    items.sort(key=lambda item: places.get(item.path, len(LONGEST) + (item.path not in slow)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collect garbage while the tests run, without searching the modules and tests, which stay until the end."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A cluster for all tests of this process."""
    if reason := postgres.missing():
        pytest.skip(reason)  # SQLite runs the same tests
    with postgres.cluster(durable=False) as url:
        yield url


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB; needs a user who may mount one."""
    with _disk(tmp_path / "tiny", 256):
        yield tmp_path / "tiny"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB, enough for a round; needs a user who may mount one."""
    with _disk(tmp_path / "small", 16 * 1024):
        yield tmp_path / "small"


@contextmanager
def _disk(target: Path, kib: int) -> Iterator[None]:
    """Mount a file system of this size at a new folder."""
    target.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", target], capture_output=True)
    if mounted.returncode != 0:
        # Mounting needs root; a file size limit, which does not, is tested as a full disk everywhere.
        pytest.skip("this user may not mount a small file system")
    try:
        yield
    finally:
        gc.collect()  # files there that only a failure's traceback still holds open
        subprocess.run(["umount", target], check=True)
