"""Milestones: each stage once, its age by the loop's own clock, told until a coordinator that can use it has heard."""

import pytest
import trio
from trio.testing import MockClock

from protocol import limits
from protocol.work.messages import Reached
from swarm_node.versions.follower import Milestones

pytestmark = pytest.mark.trio


async def test_ages_grow_from_the_first_time_a_stage_is_passed(autojump_clock: MockClock) -> None:
    milestones = Milestones()
    milestones.passed(1, "heard")
    await trio.sleep(2.0)
    milestones.passed(1, "heard")  # a download that failed begins again
    milestones.passed(1, "first_token", ago_s=0.5)
    assert milestones.unreported() == (
        Reached(version=1, stage="heard", ago_s=2.0),
        Reached(version=1, stage="first_token", ago_s=0.5),
    )


async def test_what_an_answer_was_lost_for_is_told_again_and_what_was_heard_is_not(autojump_clock: MockClock) -> None:
    milestones = Milestones()
    milestones.passed(1, "heard")
    lost = milestones.unreported()
    milestones.passed(1, "fetched")
    assert [one.stage for one in milestones.unreported()] == ["heard", "fetched"]
    milestones.acknowledge(lost, newest_version=1)
    assert [one.stage for one in milestones.unreported()] == ["fetched"]
    milestones.passed(1, "heard")
    assert [one.stage for one in milestones.unreported()] == ["fetched"]


async def test_a_version_that_its_coordinator_has_not_recorded_yet_is_told_again(autojump_clock: MockClock) -> None:
    """Trust metadata is signed a moment before the version is recorded, and longer where an upload is waited for."""
    milestones = Milestones()
    milestones.passed(2, "heard")
    milestones.acknowledge(milestones.unreported(), newest_version=1)
    await trio.sleep(1.0)
    assert milestones.unreported() == (Reached(version=2, stage="heard", ago_s=1.0),)


async def test_a_coordinator_that_is_away_for_long_is_told_of_the_last_versions_only(
    autojump_clock: MockClock,
) -> None:
    milestones = Milestones()
    for version in range(1, 2 * limits.REACHED_MAX):
        milestones.passed(version, "heard")
    await trio.sleep(2 * limits.REACHED_AGO_MAX_S)
    unreported = milestones.unreported()
    assert [one.version for one in unreported] == list(range(limits.REACHED_MAX, 2 * limits.REACHED_MAX))
    assert {one.ago_s for one in unreported} == {float(limits.REACHED_AGO_MAX_S)}
