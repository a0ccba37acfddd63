"""The leases that a node holds: a lease has one state, and every lease is answered or returned."""

from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from protocol.errors import Unreachable
from protocol.work.lease import Lease
from protocol.work.messages import ReturnLeases
from protocol.work.rollout import pack_tokens
from swarm_node.work.held_leases import RETURN_S, TURNS_WAITING_MAX, HeldLeases

pytestmark = pytest.mark.trio


def lease(number: int, turn_tokens_max: int = 0) -> Lease:
    return Lease(
        lease_id=f"{number:032x}",
        version=1,
        seed=number,
        samples=1,
        prompt=pack_tokens([1]),
        price_micros_per_mtok=1,
        expires_ms=60_000,
        turn_tokens_max=turn_tokens_max,
    )


class World:
    """A coordinator and a reporter that record what they are asked."""

    def __init__(self) -> None:
        self.returned: list[list[int]] = []
        self.reported = set[str]()
        self.answer_s = 0.0
        self.error: Exception | None = None
        self.leases = HeldLeases(cast(Any, self), cast(Any, self))

    async def return_leases(self, message: ReturnLeases) -> None:
        await trio.sleep(self.answer_s)
        if self.error:
            raise self.error
        self.returned.append([int(lease_id, 16) for lease_id in message.lease_ids])

    def start(self, lease: Lease) -> None:
        self.reported.add(lease.lease_id)

    def forget(self, lease_id: str) -> None:
        self.reported.discard(lease_id)


async def test_a_lease_is_offered_then_open_then_gone() -> None:
    world = World()
    leases, first, second = world.leases, lease(1), lease(2)
    assert leases.add_offered([first, second]) == {first.lease_id, second.lease_id}
    assert leases.add_offered([first]) == set(), "it is held already"
    leases.start([first])
    assert leases.add_offered([first]) == set(), "it is in the engine"
    assert list(leases.open) == [first.lease_id]
    assert world.reported == {first.lease_id}
    leases.close(first.lease_id)
    assert not leases.is_held(first.lease_id)
    assert world.reported == set()
    await leases.return_offered()
    await leases.return_offered()
    assert world.returned == [[2]], "what was started is not returned, and nothing twice"


async def test_turns_wait_until_they_are_offered() -> None:
    world = World()
    leases = world.leases
    turns = [lease(number, turn_tokens_max=4) for number in range(TURNS_WAITING_MAX + 1)]
    assert [leases.add_turn(turn) for turn in turns] == [True] * TURNS_WAITING_MAX + [False]
    assert leases.turns_came.is_set()
    assert leases.offer_turns() == turns[:-1]
    assert not leases.has_turns
    assert not leases.turns_came.is_set()
    leases.start(turns[:2])
    assert leases.plays
    assert leases.has_open_turn
    leases.add_offered([lease(500)])
    leases.start([lease(500)])
    assert not leases.plays, "the last that were started are no turns"
    assert leases.has_open_turn


async def test_every_lease_is_returned_at_the_end() -> None:
    world = World()
    leases = world.leases
    leases.add_offered([lease(1), lease(2)])
    leases.start([lease(1)])
    leases.add_turn(lease(3, turn_tokens_max=4))
    await leases.return_all()
    await leases.return_all()
    assert world.returned == [[1, 2, 3]], "and nothing twice"
    assert not leases.open
    assert world.reported == set()


async def test_a_coordinator_without_an_answer_delays_no_end(autojump_clock: MockClock) -> None:
    world = World()
    world.answer_s = 60.0
    world.leases.add_offered([lease(1)])
    with trio.CancelScope() as scope:
        scope.cancel()
        await world.leases.return_all()
    assert trio.current_time() == pytest.approx(RETURN_S)
    world.answer_s, world.error = 0.0, Unreachable("gone")
    await world.leases.return_leases([lease(1).lease_id])
    assert world.returned == []
