"""The worker, between a coordinator and an engine that record what they are asked."""

import math
from functools import partial

import pytest
import trio
from trio.testing import MockClock

from protocol.errors import DiskFull, EngineFailed, EngineNotStarted, Unreachable
from protocol.work.lease import Lease
from protocol.work.rollout import pack_tokens
from swarm_node.versions.fetcher import HeldVersion
from swarm_node.work.lease_pacing import REQUEST_PAUSE_S
from swarm_node.work.round_engine import CRASH_PAUSES_S, ENGINE_FAILURES_MAX, VERSION_FAILURES_MAX
from swarm_node.work.worker import LOAD_AGAIN_S
from tests.swarm_node.worker_world import World, answered, policy

pytestmark = pytest.mark.trio


async def test_more_is_leased_when_half_of_the_groups_have_ended() -> None:
    log = await World(leases=8).run()
    assert log[:3] == ["load v1", "lease v1", "submit 0 1 2 3"]
    assert log[3:9] == [*answered(0, 1), "lease v1", "submit 4 5"]
    assert log[9:15] == [*answered(2, 3), "lease v1", "submit 6 7"]
    assert log[15:] == [*answered(4, 5), "lease v1", *answered(6), "back 7"], "what is left at the end helps nobody"


async def test_groups_that_take_long_are_replaced_one_by_one(mock_clock: MockClock) -> None:
    world = World(leases=6)
    world.before_end = partial(mock_clock.jump, REQUEST_PAUSE_S)
    log = await world.run()
    assert log[:3] == ["load v1", "lease v1", "submit 0 1 2 3"]
    assert log[3:7] == [*answered(0), "lease v1", "submit 4"]
    assert log[7:11] == [*answered(1), "lease v1", "submit 5"]


async def test_a_newer_version_waits_for_the_groups_of_the_old_one_and_nothing_more_is_leased_for_that() -> None:
    world = World(leases=8)

    def publish() -> None:
        world.ready = policy(2)

    world.before_end = publish
    log = await world.run()
    assert log[:13] == ["load v1", "lease v1", "submit 0 1 2 3", *answered(0, 1, 2, 3), "load v2", "lease v2"]
    assert log[13] == "submit 4 5 6 7"


async def test_a_newer_version_does_not_wait_because_there_was_no_more_work_for_the_old_one(
    mock_clock: MockClock,
) -> None:
    mock_clock.autojump_threshold = 1.0  # what waits for the clock gets it; what waits for a thread does not
    world = World(leases=8)

    def refuse_and_publish() -> None:
        world.standby = {1}
        if world.log[-1] == "store 2":
            world.ready = policy(2)

    world.before_end = refuse_and_publish
    log = await world.run()
    assert log[3:14] == [*answered(0, 1), "lease v1", *answered(2, 3), "load v2", "lease v2"]
    assert trio.current_time() == 0


async def test_a_version_that_is_measured_stays_until_there_is_no_more_of_it() -> None:
    world = World(leases=12)
    world.measures_until = 6

    def publish() -> None:
        world.ready = policy(2)

    world.before_end = publish
    log = await world.run()
    assert log[:9] == ["load v1", "lease v1", "submit 0 1 2 3", *answered(0, 1), "lease v1", "submit 4 5"]
    assert log[9:19] == [*answered(2, 3, 4, 5), "load v2", "lease v2"], "the last reply let it go"


async def test_an_engine_that_failed_comes_back_with_the_newest_version_whatever_is_measured() -> None:
    world = World(leases=12)
    world.measures_until = 12

    def publish() -> None:
        world.ready = policy(2)

    world.on_return = publish
    world.trouble = {"submit 0 1 2 3": EngineFailed("gone")}
    assert (await world.run())[:4] == ["load v1", "lease v1", "back 0 1 2 3", "load v2"]


async def test_a_coordinator_that_is_away_costs_nothing_that_is_being_sampled() -> None:
    world = World(leases=8)

    def leave() -> None:
        world.trouble = {"lease v1": Unreachable("away")}
        world.before_end = lambda: None

    world.before_end = leave
    log = await world.run()
    assert log[3:12] == [*answered(0, 1, 2, 3), "lease v1"]


async def test_leases_for_another_version_go_back_unanswered() -> None:
    world = World(leases=4, offered_version=7)
    assert await world.run() == ["load v1", "lease v1", "back 0 1 2 3", "lease v1"]


async def test_more_leases_than_asked_for_are_refused_and_cost_no_group_that_runs() -> None:
    world = World(leases=8, at_least=8)
    assert await world.run() == ["load v1", "lease v1", "back 0 1 2 3 4 5 6 7", "lease v1"]
    world = World(leases=12)

    def offer_more() -> None:
        world.at_least = 4

    world.before_end = offer_more
    log = await world.run()
    assert log[3:8] == [*answered(0, 1), "lease v1"]
    assert log[8:14] == ["back 4 5 6 7", *answered(2, 3), "lease v1"]


async def test_a_lease_that_is_offered_twice_is_sampled_by_nobody() -> None:
    assert await World(leases=4, repeat=True).run() == ["load v1", "lease v1", "back 0", "lease v1"]


async def test_proof_that_ends_lets_no_group_wait_that_runs_and_no_other_begin() -> None:
    world = World(leases=8)

    def end_proof() -> None:
        world.proof_ended = True
        world.before_end = lambda: None

    world.before_end = end_proof
    log = await world.run()
    assert log[3:14] == [*answered(0, 1, 2, 3), "wait for proof", "lease v1", "submit 4 5 6 7"]


async def test_a_group_that_fails_goes_back_alone() -> None:
    world = World(leases=8)
    world.trouble = {"end 1": EngineFailed("no numbers")}
    log = await world.run()
    assert log[3:8] == ["end 0", "store 0", "back 1", "lease v1", "submit 4 5"]
    assert log[8:12] == answered(2, 3)


async def test_a_full_disk_gives_back_all_that_is_open() -> None:
    world = World(leases=8)
    world.trouble = {"store 1": DiskFull("full")}
    world.on_return = world.worker.finished.set
    log = await world.run()
    assert log == ["load v1", "lease v1", "submit 0 1 2 3", "end 0", "store 0", "end 1", "back 1 2 3"]


async def test_a_version_that_cannot_be_loaded_is_left_for_the_next_one() -> None:
    world, waited_s = World(leases=1), list[float]()
    world.trouble["load v1"] = EngineFailed("its weights are damaged")

    def publish(patience_s: float) -> None:
        waited_s.append(patience_s)
        world.ready = policy(2)

    world.on_wait = publish
    log = await world.run()
    assert log[:3] == ["load v2", "lease v2", "submit 0"]
    assert waited_s[0] == LOAD_AGAIN_S


async def test_a_version_that_was_removed_before_it_could_be_loaded_gives_way_to_the_newest() -> None:
    world = World(leases=1)
    world.pruned[1] = True
    pick = world.usable_now

    def publish() -> HeldVersion | None:
        chosen, world.ready = pick(), policy(2)
        return chosen

    world.usable_now = publish  # type: ignore[method-assign]  # the version changes between the choice and the load
    assert (await world.run())[:3] == ["load v2", "lease v2", "submit 0"]


async def test_an_unusable_version_is_named_and_left_until_the_next_one(mock_clock: MockClock) -> None:
    mock_clock.autojump_threshold = 1.0  # what waits for the clock gets it; what waits for a thread does not
    world, waited_s, shown = World(leases=8), list[float](), list[str]()

    def fail() -> None:
        if world.ready == policy(1):
            raise EngineFailed("it died")

    def publish(patience_s: float) -> None:
        waited_s.append(patience_s)
        shown.append(str(world.worker.trouble.error))
        world.ready = policy(2)

    world.before_end, world.on_wait = fail, publish
    world.finished_after = 4 * VERSION_FAILURES_MAX + 4
    log = await world.run()
    assert [line for line in log if line.startswith("submit")][VERSION_FAILURES_MAX - 1 :] == [
        "submit 12 13 14 15",
        "submit 16 17 18 19",
    ]
    assert waited_s == [math.inf], "it is not tried again"
    assert log[log.index("load v2") - 1] == "engine rests", "and takes no memory meanwhile"
    assert shown[0].startswith(f"Version 1 cannot be used: the engine failed {VERSION_FAILURES_MAX} times with it.")
    assert "The last time: it died" in shown[0]
    assert world.worker.trouble.error is None


async def test_an_engine_that_is_not_there_ends_the_node(mock_clock: MockClock) -> None:
    mock_clock.autojump_threshold = 1.0
    world = World(leases=1)

    def fail() -> None:
        world.trouble["load v1"] = EngineNotStarted("no such program")

    world.on_wait = lambda _patience_s: fail()
    fail()
    with pytest.raises(EngineFailed, match="no such program"):
        await world.run()


async def test_an_engine_that_fails_with_every_version_ends_the_node_and_its_leases_go_back(
    mock_clock: MockClock,
) -> None:
    mock_clock.autojump_threshold = 1.0  # what waits for the clock gets it; what waits for a thread does not
    world = World(leases=100)

    def fail() -> None:
        raise EngineFailed("it died")

    def publish(_patience_s: float) -> None:
        assert world.ready is not None
        world.ready = policy(world.ready.manifest.version + 1)

    world.before_end, world.on_wait = fail, publish
    with pytest.raises(EngineFailed, match="it died"):
        await world.run()
    submitted = [line.removeprefix("submit ") for line in world.log if line.startswith("submit")]
    assert len(submitted) == ENGINE_FAILURES_MAX
    assert submitted == [line.removeprefix("back ") for line in world.log if line.startswith("back")]
    assert trio.current_time() >= sum(CRASH_PAUSES_S), "a crash loop is slowed down"


async def test_a_worker_that_is_stopped_keeps_what_is_stored_and_returns_the_rest() -> None:
    world, stored = World(leases=8), trio.Event()

    def note_the_first() -> None:
        if world.log[-1] == "store 0":
            stored.set()

    world.before_end = note_the_first
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.run)
        await stored.wait()
        await world.worker.stop()
    of = {
        what: {number for line in world.log if line.startswith(what) for number in line.split()[1:]}
        for what in ("store", "back")
    }
    assert "0" in of["store"]
    assert of["back"] == set(map(str, range(world.given))) - of["store"]
    assert of["back"]
    await world.worker.add_turns([lease_of(9)])
    assert world.log[-1] == "back 9", "a next turn that comes with the last verdicts"


def lease_of(number: int) -> Lease:
    return Lease(
        lease_id=f"{number:032x}",
        version=1,
        seed=number,
        samples=1,
        prompt=pack_tokens([1]),
        price_micros_per_mtok=1,
        expires_ms=60_000,
    )
