"""Requests that wait: calls for idle nodes reach as many as there are queries, and a turn's offer is made once."""

import asyncio
from contextlib import ExitStack
from typing import cast

import pytest
import sqlalchemy as sa

from coordinator.service.waiting import IdleNodes, TurnWatch
from protocol.work.lease import Lease
from protocol.work.messages import LeaseReply

pytestmark = pytest.mark.asyncio

NOTHING = LeaseReply(leases=(), newest_version=1, reason="ahead", retry_s=0.0)


def offer(_connection: object) -> LeaseReply:
    return NOTHING


def offers_nothing() -> None:
    """The offer of a node that has left."""


def cancelled(*_outcome: object) -> None:
    """The end of a block whose task is cancelled."""
    raise asyncio.CancelledError


async def test_the_nodes_that_wait_the_longest_are_called() -> None:
    nodes = IdleNodes()
    with ExitStack() as held:
        waiting = [held.enter_context(nodes.waiting(offers_nothing)) for _ in range(3)]
        nodes.call(2)
        assert [node.is_called for node in waiting] == [True, True, False]
        nodes.call(1)
        assert waiting[2].is_called


async def test_a_call_reaches_a_node_that_waits_already_and_no_later_one() -> None:
    nodes = IdleNodes()
    with nodes.waiting(offers_nothing) as first:
        asyncio.get_running_loop().call_later(0.01, nodes.call, 1)
        assert await first.called(10)
        with nodes.waiting(offers_nothing) as second:
            assert not await second.called(0.01)


async def test_a_node_that_finds_nothing_passes_the_call_on_until_all_were_asked() -> None:
    nodes = IdleNodes()
    with ExitStack() as held:
        waiting = [held.enter_context(nodes.waiting(offers_nothing)) for _ in range(3)]
        nodes.call(1)
        asked = []
        while called := [node for node in waiting if node.is_called]:
            (node,) = called
            asked.append(waiting.index(node))
            node.pass_on()
        assert asked == [0, 1, 2]
        nodes.call(1)  # all wait again, in their order
        assert waiting[0].is_called


async def test_a_node_that_joins_after_a_call_does_not_get_it_passed_on() -> None:
    nodes = IdleNodes()
    with nodes.waiting(offers_nothing) as first:
        nodes.call(1)
        with nodes.waiting(offers_nothing) as second:
            first.pass_on()
            assert not second.is_called
            assert not first.is_called


async def test_an_offer_follows_a_query_for_each_node_that_is_there_and_free() -> None:
    nodes = IdleNodes()
    with ExitStack() as held:
        first = held.enter_context(nodes.waiting(lambda: offer))
        gone = held.enter_context(nodes.waiting(offers_nothing))
        others = [held.enter_context(nodes.waiting(lambda: offer)) for _ in range(2)]
        nodes.call(1)
        followers = nodes.follow(1)
        assert [node.is_called for node in (first, gone, *others)] == [True, False, True, False]
        followers[0].answer.set_result(NOTHING)
        call = await others[0].called(10)
        assert call is not None
        assert call.offered is not None
        assert await call.offered is NOTHING
        others[0].pass_on()
        assert [node.is_called for node in (gone, *others)] == [True, False, False]


async def test_a_node_whose_query_was_refused_waits_on_in_its_place() -> None:
    nodes = IdleNodes()
    with nodes.waiting(lambda: offer) as first, nodes.waiting(lambda: offer) as second:
        waking = asyncio.create_task(first.called(10))
        await asyncio.sleep(0)
        (follower,) = nodes.follow(1)
        follower.answer.set_result(None)  # before the node has seen its call
        call = await waking
        assert call is not None
        assert call.offered is follower.answer
        nodes.call(1)
        assert [first.is_called, second.is_called] == [True, False]
        assert nodes.calls == 1  # nobody makes another offer for a query that was refused


@pytest.mark.parametrize("calls", [0, 1])
async def test_the_call_of_a_node_that_hangs_up_goes_to_the_next(calls: int) -> None:
    nodes = IdleNodes()
    with ExitStack() as held:
        hanging_up = ExitStack()
        hanging_up.enter_context(nodes.waiting(offers_nothing))
        second = held.enter_context(nodes.waiting(offers_nothing))
        nodes.call(calls)
        assert not second.is_called
        hanging_up.push(cancelled)
        with pytest.raises(asyncio.CancelledError):
            hanging_up.close()
        assert second.is_called == bool(calls)
        assert len(nodes) == 1


async def test_news_are_for_everybody() -> None:
    nodes = IdleNodes()
    with nodes.waiting(offers_nothing) as first, nodes.waiting(offers_nothing) as second:
        nodes.call_all()
        assert first.is_called
        assert second.is_called


async def test_a_call_without_waiting_nodes_is_counted() -> None:
    nodes = IdleNodes()
    nodes.call(1)
    assert nodes.calls == 1
    with nodes.waiting(offers_nothing) as node:
        assert not node.is_called


LEASES = (
    Lease(lease_id="0" * 32, version=1, seed=0, samples=1, prompt=b"....", price_micros_per_mtok=0, expires_ms=0),
)
LONG_S, SHORT_S = 60.0, 0.01


def next_turns(connection: sa.Connection) -> tuple[Lease, ...]:
    return LEASES


async def test_the_offer_is_due_with_the_last_of_a_requests_answers() -> None:
    watch = TurnWatch()
    waiting = asyncio.create_task(watch.wait(["a", "b"], next_turns, patience_s=LONG_S))
    await asyncio.sleep(0)
    assert watch.request_due_with("elsewhere") is None
    assert watch.request_due_with("a") is None
    request = watch.request_due_with("b")
    assert request is not None
    assert watch.request_due_with("b") is None, "nobody else makes the same offer"
    request.settle(request.offer(cast(sa.Connection, None)))
    assert await waiting == LEASES


async def test_without_an_answer_a_request_waits_no_longer_than_it_may() -> None:
    watch = TurnWatch()
    assert await watch.wait(["a"], next_turns, patience_s=SHORT_S) is None
    assert watch.request_due_with("a") is None


async def test_a_request_whose_offer_has_begun_waits_for_its_leases() -> None:
    watch = TurnWatch()
    waiting = asyncio.create_task(watch.wait(["a"], next_turns, patience_s=SHORT_S))
    await asyncio.sleep(0)
    request = watch.request_due_with("a")
    assert request is not None
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5 * SHORT_S):
            await asyncio.shield(waiting)
    request.settle(LEASES)
    assert await waiting == LEASES
