"""Workers of several rounds with one engine: what is asked where, what is sampled, and who has the engine when."""

import math
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from protocol.errors import EngineFailed, Unreachable
from protocol.work.messages import LeaseReply, LeaseRequest
from protocol.work.rollout import Sample, pack_tokens
from swarm_node.engine.messages import GroupDone, Loaded, SampleRequest
from swarm_node.work.engine_turn import EPISODES_END_S, REQUEST_AGAIN_S, EngineTurns
from swarm_node.work.worker import TURN_WAIT_S
from tests.swarm_node.worker_world import DEADLINE_S, World

pytestmark = pytest.mark.trio


class OneRound(World):
    """A coordinator that is dry, instead of finished, until the test ends it; its log is shared."""

    def __init__(self, number: int, leases: int, log: list[str]) -> None:
        super().__init__(leases=leases)
        self.number, self.shared_log = number, log
        self.ends = trio.Event()
        self.held: trio.Event | None = None
        """A request without work waits for this, as while a learner trains."""
        self.on_note: dict[str, Any] = {}
        self.patience_s: list[float] = []

    def note(self, what: str) -> None:
        super().note(what)
        self.shared_log.append(f"{self.number}: {what}")
        if act := self.on_note.pop(what, None):
            act()

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        reply = await super().lease(request)
        if not reply.leases and self.held is not None and not self.ends.is_set():
            held, self.held = self.held, None
            await held.wait()
            reply = await super().lease(request)
        return reply if reply.leases or self.ends.is_set() else reply.model_copy(update={"reason": "busy"})

    async def newer_than(self, policy: Any, *, patience_s: float) -> None:
        self.patience_s.append(patience_s)
        with trio.move_on_after(min(patience_s, 0.02)):  # waiting is no part of what is tested
            await self.ends.wait()


class SharedEngine:
    """The engine as one round sees it; what is sampled must be what was loaded for this round."""

    name, cards_ready = "fake", 1
    requests: deque[SampleRequest]
    loaded: tuple[int, int]

    def __init__(self, world: OneRound, shared: "SharedEngine | None") -> None:
        self._world, self._shared = world, shared or self
        if shared is None:
            self.requests, self.loaded = deque(), (-1, 0)

    def speed_with(self, choose: object) -> float:
        return 1.0

    async def load(self, folder: Path, version: int, *more: object) -> Loaded:
        assert not self._shared.requests, "groups are in the engine"
        self._world.note(f"load v{version}")
        self._shared.loaded = self._world.number, version
        return Loaded(parameters=1, numerics="fake/fp32/cpu", rebuilt=False, seconds=0.0)

    async def submit(self, requests: Sequence[SampleRequest]) -> None:
        for request in requests:
            assert self._shared.loaded == (self._world.number, request.version)
        self._shared.requests.extend(requests)
        self._world.note("submit " + " ".join(str(int(request.request_id, 16)) for request in requests))

    async def finished(self, interrupted: trio.Event | None = None) -> GroupDone | None:
        await trio.lowlevel.checkpoint()
        if not self._shared.requests:
            return None
        request = self._shared.requests.popleft()
        self._world.note(f"end {int(request.request_id, 16)}")
        sample = Sample(tokens=pack_tokens([1]), logprobs=bytes(4), finish="stop")
        return GroupDone(request_id=request.request_id, samples=(sample,), first_token_ago_s=0.0)

    async def cancel(self, request_ids: Collection[str]) -> None:
        kept = (request for request in self._shared.requests if request.request_id not in request_ids)
        self._shared.requests = deque(kept)

    async def rest(self) -> None:
        assert not self._shared.requests, "groups are in the engine"
        self._shared.loaded = (-1, 0)
        self._world.note("engine rests")


class Rounds:
    """Rounds with one engine, and the log of all that they are asked, in order."""

    def __init__(self, *leases: int) -> None:
        self.log: list[str] = []
        self.worlds = [OneRound(number, count, self.log) for number, count in enumerate(leases)]
        self.turns = turns = EngineTurns()
        first: SharedEngine | None = None
        for number, world in enumerate(self.worlds):
            engine = SharedEngine(world, first)
            first = first or engine
            world.engine.pool, world.engine.turn = cast(Any, engine), turns.turn_of(number)

    def end(self) -> None:
        for world in self.worlds:
            world.ends.set()

    async def run(self, deadline_s: float = DEADLINE_S) -> list[str]:
        with trio.move_on_after(deadline_s) as limit:
            async with trio.open_nursery() as nursery:
                for world in self.worlds:
                    nursery.start_soon(world.worker.run)
        assert not limit.cancelled_caught, self.log
        return self.log

    def work(self) -> list[str]:
        """Return what the engine did."""
        return [line for line in self.log if line.split()[1] in ("load", "submit", "end")]


def sampled(number: int, *groups: int) -> list[str]:
    submit = f"{number}: submit " + " ".join(map(str, groups))
    return [submit, *(f"{number}: end {group}" for group in groups)]


async def test_a_dry_round_hands_the_engine_to_the_next_one() -> None:
    rounds = Rounds(4, 4, 4)
    rounds.worlds[2].on_note["end 3"] = rounds.end
    await rounds.run()
    expected = [line for number in range(3) for line in (f"{number}: load v1", *sampled(number, 0, 1, 2, 3))]
    assert rounds.work() == expected


async def test_a_round_whose_request_is_held_hands_the_engine_over_and_gets_it_back_with_the_answer() -> None:
    """No lease is given up: the second round's groups end first."""
    rounds = Rounds(4, 8)
    first, second = rounds.worlds
    first.held = held = trio.Event()

    def more_work() -> None:
        first.finished_after = 8
        held.set()

    second.on_note["end 1"] = more_work
    second.on_note["end 7"] = rounds.end
    await rounds.run()
    work = rounds.work()
    assert work[:9] == ["0: load v1", *sampled(0, 0, 1, 2, 3), "1: load v1", "1: submit 0 1 2 3", "1: end 0"]
    back = work.index("0: submit 4 5")
    assert "1: end 3" in work[:back], "the groups of the second round end first"
    assert "1: end 7" in work[back:], "it gets the engine back"
    assert not any(" back" in line for line in rounds.log)


async def test_another_order_has_the_engine_after_the_running_groups_and_no_lease_is_returned() -> None:
    """The first round has more work; the second one pays more, as is known from the third group on."""
    rounds = Rounds(40, 8)
    first, second = rounds.worlds
    assert first.engine.is_new
    assert second.engine.is_new
    first.on_note["end 2"] = lambda: rounds.turns.set_order((1, 0))
    second.on_note["end 7"] = rounds.end
    await rounds.run()
    loads = [line for line in rounds.work() if "load" in line]
    assert loads[:2] == ["0: load v1", "1: load v1"]
    switch = rounds.work().index("1: load v1")
    begun = {name for line in rounds.work()[:switch] if "submit" in line for name in line.split()[2:]}
    ended = {line.split()[2] for line in rounds.work()[:switch] if "end" in line}
    assert begun == ended, "the groups of the first round end first"
    assert len(ended) < 40, "it had more work"
    assert not any(" back" in line for line in rounds.log[: rounds.log.index("1: end 7")])
    assert not first.engine.is_new
    assert second.offers.last_price_micros_per_mtok == 1


async def test_a_round_is_new_until_its_first_load_has_ended() -> None:
    """A round in its first load is not measured: if it came last in the order, it would lose the engine to another."""
    rounds = Rounds(4, 4)
    second, seen = rounds.worlds[1], list[bool]()
    second.on_note["load v1"] = lambda: seen.append(second.engine.is_new)
    second.on_note["end 3"] = rounds.end
    await rounds.run()
    assert seen == [True]
    assert not second.engine.is_new


async def test_a_round_whose_first_load_fails_is_no_longer_new() -> None:
    rounds = Rounds(4, 4)
    first, second = rounds.worlds
    first.trouble["load v1"] = EngineFailed("broken")
    second.on_note["end 3"] = rounds.end
    await rounds.run()
    assert not first.engine.is_new


async def test_rounds_without_work_load_nothing_and_look_at_a_bounded_pace() -> None:
    rounds = Rounds(4, 4)
    first, second = rounds.worlds
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 20:
            rounds.end()
        first.on_note["lease v1"] = look

    second.on_note["end 3"] = look
    await rounds.run()
    assert rounds.work() == ["0: load v1", *sampled(0, 0, 1, 2, 3), "1: load v1", *sampled(1, 0, 1, 2, 3)]
    assert all(patience_s >= REQUEST_AGAIN_S for patience_s in first.patience_s[-18:])


async def test_an_unreachable_round_does_not_stop_the_next_one() -> None:
    rounds = Rounds(4, 4)
    first, second = rounds.worlds
    first.trouble["lease v1"] = Unreachable("away")
    second.on_note["end 3"] = rounds.end
    await rounds.run()
    assert {line[0] for line in rounds.work() if "submit" in line} == {"0", "1"}


async def test_a_version_that_cannot_be_loaded_leaves_the_engine_to_the_next_round() -> None:
    rounds = Rounds(4, 4)
    first, second = rounds.worlds
    first.trouble["load v1"] = EngineFailed("broken")
    second.on_note["end 3"] = rounds.end
    await rounds.run()
    assert rounds.work()[:2] == ["1: load v1", "1: submit 0 1 2 3"]


async def test_a_pause_ends_the_groups_and_frees_the_memory_and_work_goes_on_afterwards() -> None:
    rounds = Rounds(4, 8)
    second = rounds.worlds[1]

    def pause() -> None:
        for world in rounds.worlds:
            world.decide("hours")

    def resume() -> None:
        assert not any("submit 4" in line for line in rounds.log), "nothing is begun meanwhile"
        for world in rounds.worlds:
            world.decide()

    second.on_note["end 0"] = pause
    second.on_note["engine rests"] = resume
    second.on_note["end 7"] = rounds.end
    await rounds.run()
    assert rounds.work()[-6:] == ["1: load v1", *sampled(1, 4, 5, 6, 7)]
    assert "1: engine rests" in rounds.log


async def test_finish_ends_every_round_after_the_running_groups() -> None:
    rounds = Rounds(4, 8)
    second = rounds.worlds[1]

    def finish() -> None:
        for world in rounds.worlds:
            world.finishing = True
            world.decide("finishing")

    second.on_note["end 0"] = finish
    await rounds.run()
    assert rounds.work()[-4:] == [f"1: end {group}" for group in range(4)]
    assert not any(" back" in line for line in rounds.log)


class EndlessEpisodes(OneRound):
    """A coordinator that leases one turn of an episode, and then says that a next turn is due; `drips` gives it."""

    def __init__(self, number: int, log: list[str], *, drips: bool) -> None:
        super().__init__(number, 1, log)
        self.drips = drips

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        await trio.sleep(1.0)
        assert len(self.asked) < EPISODES_END_S + TURN_WAIT_S, "the earlier round waits for ever"
        reply = await super().lease(request)
        turns = tuple(lease.model_copy(update={"turn_tokens_max": 4}) for lease in reply.leases)
        if not turns and self.drips and not self.ends.is_set():
            self.finished_after += 1
        return reply.model_copy(update={"leases": turns, "stays": True, "retry_s": 1.0})

    async def newer_than(self, policy: Any, *, patience_s: float) -> None:
        await trio.sleep(1.0)


@pytest.mark.parametrize("drips", [False, True])
async def test_episodes_without_end_give_the_engine_to_an_earlier_round(drips: bool, autojump_clock: MockClock) -> None:
    rounds = Rounds(0, 0)
    first = rounds.worlds[0]
    second = EndlessEpisodes(1, rounds.log, drips=drips)
    second.engine.pool = cast(Any, SharedEngine(second, cast(Any, first.engine.pool)))
    second.engine.turn = rounds.worlds[1].engine.turn
    rounds.worlds[1] = second
    first.engine.numerics = "fake/fp32/cpu"

    def more_work() -> None:
        first.finished_after = 4

    second.on_note["end 0"] = more_work
    first.on_note["end 3"] = rounds.end
    await rounds.run(deadline_s=math.inf)  # the clock jumps to the next deadline while a thread writes
    work = rounds.work()
    last = work.index("0: end 3")  # the other round may begin again before both have seen the end
    assert work[last - 5 : last + 1] == ["0: load v1", *sampled(0, 0, 1, 2, 3)]
