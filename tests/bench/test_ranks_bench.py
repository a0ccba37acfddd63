"""bench/ranks: one process and two ranks make the same update."""

from pathlib import Path

import pytest

from bench.learner import CASES, make_model
from bench.ranks import turn

pytestmark = pytest.mark.processes


@pytest.mark.slow
def test_a_turn_tells_what_an_update_took_and_both_come_to_the_same_gradient(tmp_path: Path) -> None:
    make_model(CASES[0], tmp_path)
    (alone_s, alone), (shared_s, shared) = (turn(CASES[0], tmp_path, size, steps=2) for size in (1, 2))
    assert alone_s > 0
    assert shared_s > 0
    assert shared == pytest.approx(alone, rel=1e-4)
