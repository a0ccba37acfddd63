"""The worker and the turns of episodes: begun at once, whatever the worker waits for, and finished before a swap."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from protocol import limits
from protocol.errors import EngineFailed
from protocol.work.lease import Lease
from protocol.work.messages import LeaseReply, LeaseRequest
from protocol.work.rollout import pack_tokens
from swarm_node.engine.messages import GroupDone, GroupFailed, SampleRequest
from swarm_node.work.lease_offers import TURN_DUE
from tests.swarm_node.worker_world import DEADLINE_S, World, answered, policy, settled

pytestmark = pytest.mark.trio

RETRY_S = 7.0


def turn(number: int, **changes: Any) -> Lease:
    fields: dict[str, Any] = {
        "lease_id": f"{number:032x}",
        "version": 1,
        "seed": number % 10,
        "samples": 1,
        "prompt": pack_tokens([1]),
        "price_micros_per_mtok": 1,
        "expires_ms": 60_000,
        "turn_tokens_max": 4,
    }
    return Lease(**(fields | changes))


class Games(World):
    """A coordinator that leases one turn, and has no other work until `over`."""

    def __init__(self) -> None:
        super().__init__(leases=0)
        self.replies: list[LeaseReply] = []
        """The next replies, before the round ends."""
        self.arriving: dict[int, Lease] = {}
        """Turns that the sender gets while the worker awaits the engine for the n-th time, counted from 1."""
        self.arriving_before: dict[int, Lease] = {}
        """Turns that the sender gets before the answer to the n-th request for work, counted from 1."""
        self.reasons = list[str]()
        """The worker's reason for having no work, at each request."""
        self.awaited = 0
        self.published = trio.Event()
        self.submitted = trio.Event()
        """Set as soon as the engine gets a request; replaced by whoever waits for the next one."""

    def publish(self) -> None:
        self.ready = policy(2)
        self.published.set()

    def replies_with(self, *leases: Lease, stays: bool = False, retry_s: float = RETRY_S) -> None:
        reason: Any = "" if leases else "ahead"
        self.replies.append(LeaseReply(leases=leases, newest_version=1, reason=reason, retry_s=retry_s, stays=stays))

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        self.reasons.append(self.offers.no_work)
        if not self.replies:
            return await super().lease(request)
        self.note(f"lease v{request.version}")
        self.asked.append(request)
        reply = self.replies.pop(0)
        if lease := self.arriving_before.pop(len(self.asked), None):
            self.submitted = trio.Event()
            await self.worker.add_turns([lease])
            await self.submitted.wait()
            await settled()
            self.note("reply")
        return reply

    async def submit(self, requests: Sequence[SampleRequest]) -> None:
        self.submitted.set()
        await super().submit(requests)

    async def newer_than(self, policy: Any, *, patience_s: float) -> None:
        with trio.move_on_after(patience_s):
            await self.published.wait()

    async def finished(self, interrupted: trio.Event | None = None) -> GroupDone | GroupFailed | None:
        self.awaited += 1
        if lease := self.arriving.pop(self.awaited, None):
            await self.worker.add_turns([lease])
        return await super().finished(interrupted)

    async def while_running(self, act: Callable[[], Any]) -> list[str]:
        """Run the worker, and `act` beside it."""
        with trio.fail_after(DEADLINE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(act)
                await self.worker.run()
        return self.log


async def test_a_turn_wakes_a_worker_that_waits_for_work(mock_clock: MockClock) -> None:
    """A worker may wait for the coordinator's work, a pause after a failure, or proof that its version is sound."""
    mock_clock.autojump_threshold = 1.0
    for wait in ("work", "pause", "proof"):
        world = Games()
        world.replies_with(turn(0))
        world.replies_with(retry_s=30.0)

        async def play(world: Games = world, wait: str = wait) -> None:
            while f"store {0}" not in world.log:
                await trio.lowlevel.checkpoint()
            if wait == "pause":
                world.pacing.pause(30.0)
            world.proof_ended = wait == "proof"
            await wait_all_tasks_blocked()
            started = trio.current_time()
            await world.worker.add_turns([turn(10)])
            while "store 10" not in world.log:
                await trio.lowlevel.checkpoint()
            assert trio.current_time() - started < 1

        log = await world.while_running(play)
        assert [line for line in log if "10" in line] == ["submit 10", *answered(10)]


async def test_a_turn_is_begun_while_other_groups_run() -> None:
    world = Games()
    world.replies_with(*map(turn, range(4)))
    world.arriving = {2: turn(10)}
    log = await world.run()
    assert log[2:10] == ["submit 0 1 2 3", *answered(0), "submit 10", *answered(1, 2)]


async def test_a_turn_is_sampled_and_stored_before_the_answer_to_a_request_for_work() -> None:
    world = Games()
    world.replies_with(turn(0))
    world.replies_with(turn(1))
    world.arriving_before = {2: turn(10)}
    log = await world.run()
    at_reply = log.index("reply")
    assert log[:at_reply] == ["load v1", "lease v1", "submit 0", *answered(0), "lease v1", "submit 10", *answered(10)]
    assert log[at_reply + 1] == "submit 1"
    assert not [line for line in log if line.startswith("back")]


@pytest.mark.parametrize("place", ["submit 10", "reply"])
async def test_an_engine_that_fails_with_a_turn_loses_none_of_the_leases_in_the_answer(place: str) -> None:
    world = Games()
    world.replies_with(turn(0))
    world.replies_with(turn(1))
    world.arriving_before = {2: turn(10)}
    world.trouble = {place: EngineFailed("gone")}
    log = await world.run()
    back = {word for line in log if line.startswith("back") for word in line.split()[1:]}
    assert back == ({"1", "10"} if place == "submit 10" else set())


async def test_turns_that_cannot_be_begun_are_returned_at_once() -> None:
    """Turns of an older version or an unknown one, before the first load, behind a closed gate, and after the end."""
    world = Games()
    await world.worker.add_turns([turn(1)])
    world.engine._last_loaded = policy(2)
    await world.worker.add_turns([turn(2), turn(3, version=3), turn(4, version=2)])
    world.decide("hours")
    await world.worker.add_turns([turn(5, version=2)])
    world.decide()
    world.worker.finished.set()
    await world.worker.add_turns([turn(6, version=2)])
    assert world.log == ["back 1", "back 2 3", "back 5", "back 6"]
    await world.worker.run()
    assert world.log[4:] == ["back 4"], "what is not begun at the end is returned as well"


async def test_a_turn_that_comes_before_the_gate_closes_is_returned_when_it_has_closed() -> None:
    world = Games()
    world.replies_with(turn(0), turn(1))
    world.arriving = {2: turn(10)}
    finished = world.finished

    async def close(interrupted: trio.Event | None = None) -> GroupDone | GroupFailed | None:
        group = await finished(interrupted)
        if world.awaited == 2:
            world.decide("hours")
            world.finishing = True
        return group

    world.finished = close  # type: ignore[method-assign]  # the gate closes at a moment that only the engine sees
    log = await world.run()
    assert "back 10" in log
    assert "submit 10" not in log


async def test_a_turn_that_comes_twice_is_sampled_once() -> None:
    world = Games()
    world.engine._last_loaded = policy(1)
    world.worker.finished.set()
    world.worker.finished = trio.Event()
    await world.worker.add_turns([turn(10), turn(10)])
    await world.worker.add_turns([turn(10)])
    log = await world.run()
    assert log.count("submit 10") == 1
    assert not [line for line in log if line.startswith("back")]


async def test_more_turns_than_a_request_may_have_are_returned() -> None:
    world = Games()
    world.engine._last_loaded = policy(1)
    await world.worker.add_turns([turn(number) for number in range(limits.LEASES_PER_REQUEST_MAX + 1)])
    assert world.log == [f"back {limits.LEASES_PER_REQUEST_MAX}"]


async def test_a_turn_is_recorded_and_priced_as_any_lease(mock_clock: MockClock) -> None:
    mock_clock.autojump_threshold = 1.0
    world = Games()
    world.engine._last_loaded = policy(1)
    world.price_floor = 2
    await world.worker.add_turns([turn(10), turn(11, price_micros_per_mtok=2)])
    log = await world.run()
    assert log[:2] == ["back 10", "submit 11"]
    assert world.kept == {turn(11).lease_id}


async def test_a_newer_version_waits_for_the_last_turn_and_asks_are_a_pause_apart(mock_clock: MockClock) -> None:
    """The first turn's answer was lost on the way back, so that the next one comes by an ordinary request."""
    mock_clock.autojump_threshold = 1.0
    world = Games()
    world.replies_with(turn(0))
    world.replies_with(stays=True)
    world.replies_with(stays=True)
    world.replies_with(turn(10))
    world.replies_with()
    world.before_end = world.publish
    log = await world.run()
    asks = ["lease v1"] * 3
    assert log[:-1] == ["load v1", "lease v1", "submit 0", *answered(0), *asks, "submit 10", *answered(10), *log[11:-1]]
    assert log[11:] == ["lease v1", "load v2", "lease v2"]
    assert [(one.version, one.finishing) for one in world.asked] == [(1, False), *[(1, True)] * 4, (2, False)]
    assert trio.current_time() == 2 * RETRY_S


async def test_who_waits_for_its_environment_says_so_until_nothing_is_due(mock_clock: MockClock) -> None:
    mock_clock.autojump_threshold = 1.0
    world = Games()
    world.replies_with(turn(0))
    world.replies_with(stays=True)
    world.replies_with()
    await world.run()
    assert world.reasons[:4] == ["", "", TURN_DUE, ""]


async def test_a_turn_that_comes_while_a_newer_version_waits_is_begun_first(mock_clock: MockClock) -> None:
    mock_clock.autojump_threshold = 1.0
    world = Games()
    world.replies_with(turn(0))
    world.replies_with(stays=True)
    world.replies_with()
    world.replies_with()
    world.before_end = world.publish

    async def play() -> None:
        while world.log.count("lease v1") < 2:
            await trio.lowlevel.checkpoint()
        await wait_all_tasks_blocked()
        await world.worker.add_turns([turn(10)])

    log = await world.while_running(play)
    assert log[5:] == ["lease v1", "submit 10", "lease v1", *answered(10), "lease v1", "load v2", "lease v2"]
    assert trio.current_time() == 0


async def test_an_engine_that_fails_with_a_turn_returns_it_and_no_older_version_is_waited_for() -> None:
    world = Games()
    world.replies_with(turn(0))
    world.on_return = world.publish
    world.trouble = {"submit 0": EngineFailed("gone")}
    assert await world.run() == ["load v1", "lease v1", "back 0", "load v2", "lease v2"]


async def test_turns_that_wait_are_returned_when_the_worker_is_stopped() -> None:
    world = Games()
    world.replies_with(turn(0))

    async def never(interrupted: trio.Event | None = None) -> GroupDone | GroupFailed | None:
        await world.worker.add_turns([turn(10)])
        scope.cancel()
        await trio.sleep_forever()
        return None

    world.finished = never  # type: ignore[method-assign]  # an engine that ends nothing
    with trio.CancelScope() as scope:
        await world.run()
    assert world.log[-1] == "back 0 10"
