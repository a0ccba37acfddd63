"""Turns of several rounds at one engine: who has it, and when another one may have it."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from swarm_node.work.engine_turn import EngineTurns

pytestmark = pytest.mark.trio


async def test_an_agent_with_one_round_always_has_its_turn() -> None:
    turn = EngineTurns().turn_of(0)
    assert turn.is_mine
    turn.release()
    assert turn.is_mine
    assert turn.try_acquire()
    assert not turn.must_release
    assert not turn.is_used_by_other


async def test_a_lent_engine_stays_until_another_round_takes_it() -> None:
    turns = EngineTurns()
    first, second = turns.turn_of(0), turns.turn_of(1)
    assert first.try_acquire()
    assert not second.try_acquire()
    assert second.is_used_before
    first.release()
    assert first.is_mine, "its version is still in the engine"
    assert not second.is_used_before
    assert second.try_acquire()
    assert not first.is_mine
    assert first.is_used_by_other


async def test_of_several_waiting_rounds_the_first_is_next_and_the_holder_is_asked_to_finish() -> None:
    turns = EngineTurns()
    first, second, third = (turns.turn_of(number) for number in range(3))
    order = []

    async def use(name: str, number: int) -> None:
        await turns.turn_of(number).acquire()
        order.append(name)

    assert first.try_acquire()
    first.release()
    assert third.try_acquire()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(use, "second", 1)
        await wait_all_tasks_blocked()
        nursery.start_soon(use, "first", 0)
        await wait_all_tasks_blocked()
        assert third.must_release
        assert order == [], "a holder is never interrupted"
        third.release()
        assert not third.try_acquire(), "it does not come before those that waited"
        await wait_all_tasks_blocked()
        assert order == ["first"]
        assert not first.must_release
        first.release()
    assert order == ["first", "second"]
    assert second.is_mine


async def test_leases_do_not_wait_for_an_earlier_round_that_works() -> None:
    turns = EngineTurns()
    first, second, third = (turns.turn_of(number) for number in range(3))
    first.release()
    assert third.try_acquire()
    got: list[bool] = []

    async def wait() -> None:
        got.append(await second.acquire_unless_used())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        assert got == []
        nursery.start_soon(first.acquire)
        await wait_all_tasks_blocked()
        third.release()
        await wait_all_tasks_blocked()
        assert first.is_mine
        assert got == [False]


async def test_a_round_that_stops_waiting_asks_for_nothing() -> None:
    turns = EngineTurns()
    first, second = turns.turn_of(0), turns.turn_of(1)
    first.release()
    assert second.try_acquire()
    with trio.move_on_after(0):
        await first.acquire()
    assert not second.must_release


async def test_an_order_that_changes_asks_the_holder_to_finish_and_lets_go_on_who_waits_for_an_earlier_round() -> None:
    turns = EngineTurns()
    first, second = turns.turn_of(0), turns.turn_of(1)
    assert first.try_acquire()
    assert second.is_used_before
    async with trio.open_nursery() as nursery:
        nursery.start_soon(second.unused_before)
        await wait_all_tasks_blocked()
        turns.set_order((1, 0))
        with trio.fail_after(1):
            while nursery.child_tasks:
                await trio.lowlevel.checkpoint()
    assert not first.must_release, "the second round has no work"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(second.acquire)
        await wait_all_tasks_blocked()
        assert first.must_release
        first.release()
    assert second.is_mine
    assert first.is_used_before
    turns.set_order((0, 1))
    assert not first.is_used_before
