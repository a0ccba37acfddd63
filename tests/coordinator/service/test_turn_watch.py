"""Requests that wait for environments: offers are made with the last answer, or not at all by anybody else."""

import asyncio
from typing import cast

import pytest
import sqlalchemy as sa

from coordinator.service.turn_watch import TurnWatch
from protocol.work.lease import Lease

pytestmark = pytest.mark.asyncio

LEASES = (
    Lease(lease_id="0" * 32, version=1, seed=0, samples=1, prompt=b"....", price_micros_per_mtok=0, expires_ms=0),
)
LONG_S, SHORT_S = 60.0, 0.01


def offer(connection: sa.Connection) -> tuple[Lease, ...]:
    return LEASES


async def test_the_offer_is_due_with_the_last_of_a_requests_answers() -> None:
    watch = TurnWatch()
    waiting = asyncio.create_task(watch.wait(["a", "b"], offer, patience_s=LONG_S))
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
    assert await watch.wait(["a"], offer, patience_s=SHORT_S) is None
    assert watch.request_due_with("a") is None


async def test_a_request_whose_offer_has_begun_waits_for_its_leases() -> None:
    watch = TurnWatch()
    waiting = asyncio.create_task(watch.wait(["a"], offer, patience_s=SHORT_S))
    await asyncio.sleep(0)
    request = watch.request_due_with("a")
    assert request is not None
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5 * SHORT_S):
            await asyncio.shield(waiting)
    request.settle(LEASES)
    assert await waiting == LEASES
