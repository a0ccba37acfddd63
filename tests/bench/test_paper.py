"""The paper's numbers come out of the real cores."""

import pytest

from bench.paper import headline, knee, spread, table2
from bench.paper.setting import MODEL_MB


def test_table_2_comes_out_within_two_percent() -> None:
    for ours, published in zip(table2.reproduced(), table2.PUBLISHED, strict=True):
        assert ours.machines == published.machines
        assert ours.cost == pytest.approx(published.cost, rel=0.02)
        assert ours.wait_s == pytest.approx(published.wait_s, abs=2.0)


def test_the_simulated_learner_waits_below_the_foretold_knee_and_not_above() -> None:
    below, above = (knee.simulated(3, "overlap", workers)["bubble"] for workers in (6, 9))
    assert below > 0.05
    assert above < 0.01


def test_the_published_saving_comes_out_and_admission_on_the_visible_version_adds_to_it() -> None:
    saved = {line.way: line.saved for line in headline.lines()}
    assert saved["ECHO-2's rule, S = 3"] == pytest.approx(0.333, abs=0.01)
    assert saved["visible versions, S = 3"] > saved["ECHO-2's rule, S = 3"] + 0.04
    assert saved["the learner alone, were rollouts free"] < 0.5


def test_a_star_grows_with_its_workers_and_trees_do_not() -> None:
    assert spread.star_limited(64, 800) > 5 * spread.star_limited(9, 800)
    assert spread.pipelined(64, 800) < 1.05 * spread.star_unlimited(64)
    assert spread.pipelined(64, 300, 0.01 * MODEL_MB) < 0.2 * spread.pipelined(64, 300)
