"""One computation answers all who ask in the same moment."""

import asyncio

import pytest

from coordinator.api.shared import Shared

pytestmark = pytest.mark.asyncio


class Counted:
    """Answers with how often it was asked, once it may."""

    def __init__(self) -> None:
        self.times = 0
        self.may = asyncio.Event()
        self.fails = False

    async def compute(self) -> int:
        self.times += 1
        await self.may.wait()
        if self.fails:
            raise KeyError
        return self.times


async def test_a_thousand_who_ask_at_once_cost_one_computation() -> None:
    counted = Counted()
    shared = Shared(counted.compute)
    asked = [asyncio.create_task(shared.get()) for _ in range(1000)]
    await asyncio.sleep(0)
    counted.may.set()
    assert set(await asyncio.gather(*asked)) == {1}


async def test_an_answer_that_is_too_old_is_computed_anew() -> None:
    counted = Counted()
    counted.may.set()
    shared = Shared(counted.compute, keep_s=0.0)
    assert [await shared.get(), await shared.get()] == [1, 2]


async def test_who_hangs_up_while_computing_leaves_the_answer_to_the_next() -> None:
    counted = Counted()
    shared = Shared(counted.compute)
    first, second = (asyncio.create_task(shared.get()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    counted.may.set()
    assert await second == 2


async def test_a_failure_is_not_kept() -> None:
    counted = Counted()
    counted.may.set()
    counted.fails = True
    shared = Shared(counted.compute)
    with pytest.raises(KeyError):
        await shared.get()
    counted.fails = False
    assert await shared.get() == 2
