"""The highest price of a request: which idle node answers, and what a caller learns if none does."""

import asyncio
from pathlib import Path

import pytest

from coordinator.api.guard import Bounds
from tests.coordinator.api.test_completions import ask, echoed, idling, make_key, post, refused
from tests.coordinator.served import serve

pytestmark = pytest.mark.asyncio


async def test_an_unanswered_request_with_a_highest_price_is_advised_to_raise_it(tmp_path: Path) -> None:
    async with serve(tmp_path, bounds=Bounds(query_s=0.05, query_alive_s=0.01)) as served:
        await served.publish()
        key = await make_key(served)
        for fields, advised in (({}, False), ({"max_price_micros_per_mtok": 1}, True)):
            _, error = await refused(served, key, **fields)
            response = await post(served, key, {"model": "swarm", "prompt": "1+2=", "stream": True, **fields})
            for text in (error["message"], await response.text()):
                assert ("max_price_micros_per_mtok" in text) == advised, text


async def test_an_idle_node_above_a_querys_price_passes_it_to_a_cheaper_one_and_waits_on(tmp_path: Path) -> None:
    async with serve(tmp_path, bounds=Bounds(lease_hold_s=600.0)) as served:
        await served.publish()
        key, dear, cheap = await make_key(served), await served.join(1), await served.join(2, price_micros_per_mtok=500)
        waits, gets = await idling(served, dear, cheap)
        waiting = asyncio.create_task(ask(served, key, max_price_micros_per_mtok=500))
        (lease,) = await gets
        assert lease.price_micros_per_mtok == 500
        assert not waits.done()
        await served.submit(cheap, echoed(served, cheap, lease))
        assert (await waiting)["choices"][0]["text"] == "1+2="
        waiting = asyncio.create_task(ask(served, key))
        (lease,) = await waits
        await served.submit(dear, echoed(served, dear, lease))
        await waiting
