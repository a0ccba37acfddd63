"""An agent that leaves while an answer is on its way hears it, and leaves no lease behind that nobody knows of."""

import pytest
import trio
from trio.testing import MockClock

from protocol.errors import Unreachable
from protocol.work.messages import LeaseReply, LeaseRequest
from swarm_node.base.waiting import finish_when_cancelled
from swarm_node.work.worker import LAST_REPLY_S
from tests.swarm_node.worker_world import World

pytestmark = pytest.mark.trio


class Leaving(World):
    """An agent that is told to leave while a lease request is on its way."""

    answer_s = LAST_REPLY_S / 2
    scope = trio.CancelScope()

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        reply = await super().lease(request)
        self.scope.cancel()
        await trio.sleep(self.answer_s)
        return reply


async def leave(world: Leaving) -> list[str]:
    with trio.CancelScope() as world.scope:
        await world.worker.run()
    return world.log


async def test_leases_that_come_while_the_agent_leaves_go_back(autojump_clock: MockClock) -> None:
    assert await leave(Leaving(leases=8)) == ["load v1", "lease v1", "back 0 1 2 3"]


async def test_an_answer_that_takes_long_holds_no_agent_up(autojump_clock: MockClock) -> None:
    world = Leaving(leases=8)
    world.answer_s = 60.0
    assert await leave(world) == ["load v1", "lease v1"]
    assert trio.current_time() == pytest.approx(LAST_REPLY_S)


async def test_what_is_heard_is_returned_and_a_failure_is_raised_as_it_is() -> None:
    async def say() -> int:
        return 7

    async def fail() -> None:
        raise Unreachable("away")

    assert await finish_when_cancelled(say, patience_s=1.0) == 7
    with pytest.raises(Unreachable):
        await finish_when_cancelled(fail, patience_s=1.0)
