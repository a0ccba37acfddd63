"""Imported runs of other suites: recorded once, of a version of this round, and removed again."""

from dataclasses import replace

import pytest

from coordinator.transactions import suite_runs
from coordinator.transactions.suite_runs import ImportedRun, SuiteMetric, SuiteRun
from protocol import limits
from protocol.errors import NotFound
from tests.coordinator.world import World

RUN = SuiteRun("lighteval", "", "openai/swarm@1", "17.5", (SuiteMetric("sums:0", "em", 0.5, 0.1, 8),))


def test_a_run_is_recorded_with_the_update_of_its_version(world: World) -> None:
    world.publish(2, 7)
    assert world.run(suite_runs.record, RUN, 2, now_ms=5) == ImportedRun(1, 2, is_new=True)
    row = {"number": 1, "suite": "lighteval", "release": "", "version": 2, "update": 7, "imported_ms": 5}
    metric = {"task": "sums:0", "metric": "em", "value": 0.5, "stderr": 0.1, "samples": 8}
    assert world.run(suite_runs.list_runs) == [row | {"results": [metric]}]
    assert world.run(suite_runs.one_run, 1) == row | {"results": [metric]}


def test_a_run_that_is_recorded_again_changes_nothing(world: World) -> None:
    world.publish(2, 7)
    world.run(suite_runs.record, RUN, 2, now_ms=5)
    assert world.run(suite_runs.record, RUN, 1, now_ms=6) == ImportedRun(1, 2, is_new=False)
    other = replace(RUN, run="18.5")
    assert world.run(suite_runs.record, other, 2, now_ms=6) == ImportedRun(2, 2, is_new=True)
    assert [row["imported_ms"] for row in world.run(suite_runs.list_runs)] == [5, 6]


def test_a_version_that_was_never_published_has_no_results(world: World) -> None:
    with pytest.raises(NotFound, match="Version 9 was not published"):
        world.run(suite_runs.record, RUN, 9, now_ms=5)
    assert world.run(suite_runs.list_runs) == []


def test_a_removed_run_can_be_recorded_again(world: World) -> None:
    world.publish(2, 7)
    world.run(suite_runs.record, RUN, 2, now_ms=5)
    world.run(suite_runs.remove, 1)
    assert world.run(suite_runs.list_runs) == []
    with pytest.raises(NotFound, match="No run 1"):
        world.run(suite_runs.remove, 1)
    assert world.run(suite_runs.record, RUN, 2, now_ms=6).is_new


def test_the_newest_runs_are_listed_and_those_of_a_version(world: World) -> None:
    world.publish(2, 7)
    for number in range(limits.SUITE_RUNS_LISTED_MAX + 2):
        world.run(suite_runs.record, replace(RUN, run=str(number)), 1 + number % 2, now_ms=number)
    listed = world.run(suite_runs.list_runs)
    assert [row["number"] for row in listed] == list(range(3, limits.SUITE_RUNS_LISTED_MAX + 3))
    assert {row["version"] for row in world.run(suite_runs.list_runs, version=2)} == {2}
