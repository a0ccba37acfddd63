"""One computation answers all who ask in the same moment."""

import asyncio

import pytest

from coordinator.api.snapshot import Snapshot

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
    answers = Snapshot(counted.compute)
    asked = [asyncio.create_task(answers.get()) for _ in range(1000)]
    await asyncio.sleep(0)
    counted.may.set()
    assert {moment.figures for moment in await asyncio.gather(*asked)} == {1}


async def test_an_answer_that_is_too_old_is_computed_anew() -> None:
    counted = Counted()
    counted.may.set()
    now_s = [0.0]
    answers = Snapshot(counted.compute, fresh_s=1.0, shown_at_most_s=1.0, clock=lambda: now_s[0])
    found = []
    for now_s[0] in (0.0, 0.9, 5.0):
        found.append((await answers.get()).figures)
    assert found == [1, 1, 2]


async def test_who_hangs_up_while_computing_costs_the_others_nothing() -> None:
    counted = Counted()
    answers = Snapshot(counted.compute)
    first, second = (asyncio.create_task(answers.get()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    counted.may.set()
    assert (await second).figures == 1


async def test_a_failure_is_not_kept() -> None:
    counted = Counted()
    counted.may.set()
    counted.fails = True
    answers = Snapshot(counted.compute)
    with pytest.raises(KeyError):
        await answers.get()
    counted.fails = False
    assert (await answers.get()).figures == 2
