"""Calls for idle nodes: as many as there are queries, the longest waiting first, each to an end."""

import asyncio
from contextlib import ExitStack

import pytest

from coordinator.service.idle_nodes import IdleNodes

pytestmark = pytest.mark.asyncio


async def test_the_nodes_that_wait_the_longest_are_called() -> None:
    nodes = IdleNodes()
    with ExitStack() as held:
        waiting = [held.enter_context(nodes.waiting()) for _ in range(3)]
        nodes.call(2)
        assert [node.is_called for node in waiting] == [True, True, False]
        nodes.call(1)
        assert waiting[2].is_called


async def test_a_call_reaches_a_node_that_waits_already_and_no_later_one() -> None:
    nodes = IdleNodes()
    with nodes.waiting() as first:
        asyncio.get_running_loop().call_later(0.01, nodes.call, 1)
        assert await first.called(10)
        with nodes.waiting() as second:
            assert not await second.called(0.01)


async def test_a_node_that_finds_nothing_passes_the_call_on_until_all_were_asked() -> None:
    nodes = IdleNodes()
    with ExitStack() as held:
        waiting = [held.enter_context(nodes.waiting()) for _ in range(3)]
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
    with nodes.waiting() as first:
        nodes.call(1)
        with nodes.waiting() as second:
            first.pass_on()
            assert not second.is_called
            assert not first.is_called


async def test_news_are_for_everybody() -> None:
    nodes = IdleNodes()
    with nodes.waiting() as first, nodes.waiting() as second:
        nodes.call_all()
        assert first.is_called
        assert second.is_called


async def test_a_call_without_waiting_nodes_is_counted() -> None:
    nodes = IdleNodes()
    nodes.call(1)
    assert nodes.calls == 1
    with nodes.waiting() as node:
        assert not node.is_called
