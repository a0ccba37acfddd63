"""The versions that an auditor has in memory: no more than it may, even while another one is loaded."""

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.audit.auditor import Policies
from coordinator.audit.scorer import VersionScorer
from coordinator.model.watchdog import Watchdog
from coordinator.rules.replay import Prefill
from protocol.limits import AUDITOR_VERSIONS_MAX
from tests.tiny_policy import make_tiny_policy

TOKENS = np.array([19, 20, 13, 31], np.uint32)
CLAIMS = [Prefill(TOKENS, [TOKENS], 1, 1.0)]
VERSIONS = range(1, 5)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Let Python free by itself only what is in no cycle."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_a_version_leaves_memory_before_another_is_loaded(tmp_path: Path) -> None:
    known, alive = list[weakref.ref[Any]](), list[int]()

    def load(folder: Path, moved: Callable[[], None]) -> VersionScorer:
        alive.append(sum(model() is not None for model in known))
        scorer = VersionScorer(folder, moved=moved)
        known.append(weakref.ref(scorer._model))
        return scorer

    for version in VERSIONS:
        make_tiny_policy(tmp_path / str(version))
    no_archive: Any = None  # every version is in its folder, and nobody claims an exact class
    policies = Policies(no_archive, tmp_path, 9, load, Watchdog(0), no_archive)
    for version in VERSIONS:
        policies.score(version, CLAIMS)
    assert alive == [min(count, AUDITOR_VERSIONS_MAX - 1) for count in range(len(VERSIONS))]
    policies.score(VERSIONS[-2], CLAIMS)
    assert len(alive) == len(VERSIONS), "the last ones are still there"
