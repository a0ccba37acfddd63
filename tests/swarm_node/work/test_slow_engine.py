"""A round that publishes faster than an engine starts: the version on its way into the engine stays on the disk."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from protocol.work.messages import LeaseReply, LeaseRequest
from swarm_node.engine.pool import open_pool
from swarm_node.versions.follower import PolicyFollower
from tests.swarm_node.p2p_world import PATIENT_SECONDS, Version, make_version
from tests.swarm_node.versions.test_follower import CHILD, Round
from tests.swarm_node.worker_world import World

pytestmark = pytest.mark.trio

FAKE = Path(__file__).parents[1] / "engine" / "fake_child.py"


def version_of(number: int) -> Version:
    made = make_version(2, seed=number)
    return replace(made, manifest=made.manifest.model_copy(update={"version": number}))


async def publish(here: Round, follower: PolicyFollower, *numbers: int) -> None:
    for number in numbers:
        version = version_of(number)
        here.publish(version)
        for chunk, data in version.chunks.items():
            follower.fetcher._blobs.write(chunk, data)
        await follower._follow()


async def test_a_version_that_is_held_stays_until_another_is_held(tmp_path: Path) -> None:
    here = Round(version_of(1), CHILD)
    follower = here.follower(tmp_path)
    await publish(here, follower, 1)
    first = follower.ready
    assert first is not None
    assert follower.hold_versions(first)
    await publish(here, follower, 2)
    second = follower.ready
    assert second is not None
    await publish(here, follower, 3, 4)
    assert first.folder.is_dir()
    assert not second.folder.is_dir()
    assert not follower.hold_versions(second), "it may be removed already"
    assert follower.ready is not None
    assert follower.hold_versions(follower.ready, first), "the one in the engine, while the next is loaded"
    await publish(here, follower, 5, 6, 7)
    assert first.folder.is_dir()
    assert follower.hold_versions(follower.ready)
    await publish(here, follower, 8)
    assert not first.folder.is_dir()


async def test_a_node_that_joins_a_fast_round_does_not_lose_its_first_version_while_its_engine_starts(
    tmp_path: Path,
) -> None:
    """Two versions came while the engine imported its libraries, and the first one's folder was removed."""
    here, world = Round(version_of(1), CHILD), World(leases=1)
    follower = here.follower(tmp_path)
    await publish(here, follower, 1)
    leased: list[int] = []

    async def lease(request: LeaseRequest) -> LeaseReply:
        await trio.lowlevel.checkpoint()
        leased.append(request.version)
        return LeaseReply(leases=(), newest_version=1, reason="finished", retry_s=0.0)

    coordinator: Any = world
    coordinator.lease = lease
    worker, start = world.worker, tmp_path / "start"
    worker._policies = world.engine._policies = follower
    async with open_pool([sys.executable, str(FAKE), f"starts late:{start}"]) as engine:
        world.engine.pool = engine
        with trio.fail_after(PATIENT_SECONDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(worker.run)
                while not engine.starts:
                    await trio.testing.wait_all_tasks_blocked(0.01)
                await publish(here, follower, 2, 3)
                await trio.Path(start).touch()
    assert worker.trouble.error is None
    assert worker._failures._count == 0
    assert leased == [3], "the newest version, in its turn"
    assert (tmp_path / "start.loaded").read_text().splitlines() == ["1", "3"]
