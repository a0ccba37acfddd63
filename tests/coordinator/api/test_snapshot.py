"""Snapshots: a single computation answers all requests of the same moment."""

import asyncio

import pytest

from coordinator.api.snapshot import REST_MAX_S, PageSnapshot
from coordinator.reports import overview

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
    answers = PageSnapshot(counted.compute)
    asked = [asyncio.create_task(answers.get()) for _ in range(1000)]
    await asyncio.sleep(0)
    counted.may.set()
    assert {moment.figures for moment in await asyncio.gather(*asked)} == {1}


async def test_an_answer_that_is_too_old_is_computed_anew() -> None:
    counted = Counted()
    counted.may.set()
    now_s = [0.0]
    answers = PageSnapshot(counted.compute, fresh_s=1.0, shown_at_most_s=1.0, clock=lambda: now_s[0])
    found = []
    for now_s[0] in (0.0, 0.9, 5.0):
        found.append((await answers.get()).figures)
    assert found == [1, 1, 2]


async def test_who_hangs_up_while_computing_costs_the_others_nothing() -> None:
    counted = Counted()
    answers = PageSnapshot(counted.compute)
    first, second = (asyncio.create_task(answers.get()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    counted.may.set()
    assert (await second).figures == 1


async def test_a_failure_is_not_kept() -> None:
    counted = Counted()
    counted.may.set()
    counted.fails = True
    answers = PageSnapshot(counted.compute)
    with pytest.raises(KeyError):
        await answers.get()
    counted.fails = False
    assert (await answers.get()).figures == 2


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def slow(clock: Clock) -> tuple[PageSnapshot[int], Counted]:
    """Figures whose first computation has taken a minute."""
    counted = Counted()
    answers = PageSnapshot(counted.compute, clock=clock, patience_s=0.0)
    first = asyncio.create_task(answers.get())
    while not counted.times:  # noqa: ASYNC110  # a turn of the loop or two
        await asyncio.sleep(0)
    clock.now_s = 60.0
    counted.may.set()
    assert (await first).figures == 1
    return answers, counted


async def test_figures_that_took_a_minute_to_compute_are_not_frozen_for_five() -> None:
    clock = Clock()
    answers, counted = await slow(clock)
    clock.now_s += REST_MAX_S + 1
    assert (await answers.get()).figures == 1  # the next ones are being computed
    await answers.close()
    assert counted.times == 2
    assert (await answers.get()).figures == 2


async def test_figures_say_how_old_they_are_from_when_they_were_read() -> None:
    clock = Clock()
    answers, _ = await slow(clock)
    assert (answers.age_s(), answers.age_ms()) == (60.0, 60_000)
    clock.now_s += 7.0
    assert (answers.age_s(), answers.age_ms()) == (67.0, 60_000)


async def test_a_computation_that_hangs_leaves_the_old_figures_with_their_age() -> None:
    clock = Clock()
    answers, counted = await slow(clock)
    counted.may.clear()
    clock.now_s += 3600.0
    assert (await answers.get()).figures == 1
    assert answers.age_s() == 3660.0
    counted.may.set()
    await answers.close()
    assert (await answers.get()).figures == 2


async def test_old_figures_are_called_old() -> None:
    assert [part.lines for part in overview.shown_age({"age_s": 14.9})] == []
    assert "old" in next(overview.shown_age({"age_s": 75.0})).lines[0]
