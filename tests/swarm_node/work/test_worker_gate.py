"""The worker and its owner: the gate, the floor, and leases that are better declined."""

from collections.abc import Sequence

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from protocol.work.lease import Lease
from swarm_node.work.lease_offers import DECLINED_PAUSE_S
from tests.swarm_node.worker_world import DEADLINE_S, World, answered

pytestmark = pytest.mark.trio


async def test_a_gate_that_closes_lets_groups_end_and_begins_no_other_until_it_opens() -> None:
    world = World(leases=8)

    def end_of_hours() -> None:
        world.decide("hours")
        world.on_wake = lambda: None

    world.on_wake = end_of_hours
    real = world.note

    def open_gate(what: str) -> None:
        if what == "wait for the gate":
            world.decide()
        real(what)

    world.note = open_gate  # type: ignore[method-assign]  # what is recorded also moves the gate
    log = await world.run()
    assert log[3:11] == answered(0, 1, 2, 3), "nothing is leased in between"
    assert log[11:16] == ["engine rests", "wait for the gate", "load v1", "lease v1", "submit 4 5 6 7"]


async def test_a_break_for_power_keeps_the_engine() -> None:
    world = World(leases=4)
    world.decide("power")
    real = world.note

    def open_gate(what: str) -> None:
        if what == "wait for the gate":
            world.decide()
        real(what)

    world.note = open_gate  # type: ignore[method-assign]  # as above
    assert (await world.run())[:3] == ["wait for the gate", "load v1", "lease v1"]


async def test_an_owner_who_needs_the_machine_gets_it_in_the_middle_of_groups() -> None:
    world = World(leases=8)

    async def pause() -> None:
        world.decide("paused")
        await world.worker.return_open()

    real = world.note

    def end(what: str) -> None:
        real(what)
        if what == "wait for the gate":
            world.finishing = True

    world.note = end  # type: ignore[method-assign]  # as above
    async with trio.open_nursery() as nursery:

        def take_away() -> None:
            world.before_end = lambda: None
            nursery.start_soon(pause)

        world.before_end = take_away
        with trio.fail_after(DEADLINE_S):
            await world.worker.run()
    assert sorted(world.log[3:6]) == ["back 1 2 3", "end 0", "store 0"], "what was on its way to the disk is sent"
    assert world.log[6:] == ["engine rests", "wait for the gate"]
    assert world.worker.phase == "resting"


async def test_leases_that_are_being_logged_when_the_owner_pauses_are_returned() -> None:
    world = World(leases=8)
    real_record, real_note = world.record, world.note

    def pause(leases: Sequence[Lease]) -> None:
        real_record(leases)
        trio.from_thread.run_sync(world.decide, "paused")  # nothing is open yet: `return_open` would return nothing

    def end(what: str) -> None:
        real_note(what)
        if what == "wait for the gate":
            world.finishing = True

    world.record, world.note = pause, end  # type: ignore[method-assign]  # as above
    assert await world.run() == ["load v1", "lease v1", "back 0 1 2 3", "engine rests", "wait for the gate"]


async def test_a_node_that_finishes_ends_with_its_last_group() -> None:
    world = World(leases=100)

    def finish() -> None:
        world.finishing = True
        world.decide("finishing")

    world.on_wake = finish
    log = await world.run()
    assert log == ["load v1", "lease v1", "submit 0 1 2 3", *answered(0, 1, 2, 3)]


async def test_a_node_that_waits_for_its_first_version_can_be_paused_and_finished() -> None:
    world = World(leases=4)
    world.ready = None
    world.usable = trio.sleep_forever  # type: ignore[method-assign]  # no version comes
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.worker.run)
        await trio.testing.wait_all_tasks_blocked()
        world.finishing = True
        world.decide("finishing")
        with trio.fail_after(DEADLINE_S):
            await world.worker.finished.wait()
    assert world.log == []


async def test_an_expired_lease_goes_back_unbegun(autojump_clock: MockClock) -> None:
    world = World(leases=4)
    world.expires_ms = -1
    log = await world.run()
    assert log == ["load v1", "lease v1", "back 0 1 2 3", "lease v1"]
    assert trio.current_time() >= DECLINED_PAUSE_S


async def test_leases_that_cannot_be_met_at_the_measured_rate_go_back_and_the_others_are_begun() -> None:
    world = World(leases=4)
    world.speed = 1.0
    world.expires_ms = 2_000  # one sample of a token each, at a token a second
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.run)
        while len(world.log) < 4:
            await wait_all_tasks_blocked(0.01)
        nursery.cancel_scope.cancel()  # it would wait out the pause after what it declined
    assert world.log[1:4] == ["lease v1", "back 2 3", "submit 0 1"]


async def test_a_lease_below_the_owners_floor_goes_back(autojump_clock: MockClock) -> None:
    world = World(leases=4)
    world.price_floor = 2
    assert await world.run() == ["load v1", "lease v1", "back 0 1 2 3", "lease v1"]
    assert "your minimum is 0.000002 " in world.offers.no_work
    assert world.offers.last_price_micros_per_mtok is None, "the price of a lease that is not accepted counts nowhere"
