"""The speed of each round's model on the cards of a pool, whatever round has the engine now."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from swarm_node.engine.card_engine import CardEngine, CardPermit, JoinedPermit
from swarm_node.engine.cards import EngineCard
from swarm_node.engine.choose import Choice
from swarm_node.engine.messages import Loaded, SamplingStats
from swarm_node.engine.pool import EnginePool

pytestmark = pytest.mark.trio

DEADLINE_S = 20.0
PAUSED = JoinedPermit(may_work=False)


def one(unfit: Mapping[str, str]) -> Choice:
    """Stands for one round: the pool compares it with others, and nothing calls it."""
    raise NotImplementedError  # a call would be a fault


def other(unfit: Mapping[str, str]) -> Choice:
    """Stands for another round, in the same way."""
    raise NotImplementedError  # a call would be a fault


class Child:
    """The child of a card: all its models have one shape, and it samples a number of tokens in a second."""

    pid = None

    def __init__(self, tokens: int, *, rebuilt: bool) -> None:
        self.tokens, self._rebuilt = tokens, rebuilt

    async def load(self, folder: Path, version: int, choose: object) -> Loaded:
        await trio.lowlevel.checkpoint()
        return Loaded(parameters=1, numerics="fake/fp32/cpu", rebuilt=self._rebuilt, seconds=0.0)

    async def measured(self) -> SamplingStats:
        await trio.lowlevel.checkpoint()
        return SamplingStats(
            prompt_tokens=1, first_tokens=0, prefill_s=0.0, later_tokens=self.tokens, decode_s=float(self.tokens > 0)
        )


def pool_of(speeds: Sequence[int], *, rebuilt: bool = True) -> EnginePool:
    cards = [EngineCard(number, f"Fake {number}") for number in range(len(speeds))]
    children = [cast(Any, Child(tokens, rebuilt=rebuilt)) for tokens in speeds]
    return EnginePool([CardEngine(card, child) for card, child in zip(cards, children, strict=True)])


def steer(pool: EnginePool, paused: Sequence[int]) -> None:
    pool.steer({number: cast(CardPermit, PAUSED) for number in paused})


async def load(pool: EnginePool, *rounds: Any) -> None:
    """Load a version of each of the rounds in turn, by the tasks of the cards."""
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            for engine in pool._engines:
                nursery.start_soon(pool.keep, engine)
            for choose in rounds:
                await pool.load(Path("/1"), 1, choose=choose)
            nursery.cancel_scope.cancel()


async def test_what_a_rounds_groups_have_measured_is_kept_when_another_round_has_the_engine() -> None:
    pool = pool_of([40])
    await load(pool, one)
    assert pool.speed_with(one) == 0.0, "no group has ended"
    await load(pool, other)
    assert (pool.speed_with(one), pool.speed_with(other)) == (40.0, 0.0)


async def test_a_model_of_the_same_shape_has_the_same_speed_in_another_round() -> None:
    pool = pool_of([40], rebuilt=False)
    await load(pool, one, other)
    assert (pool.speed_with(one), pool.speed_with(other)) == (40.0, 40.0)


async def test_cards_that_rested_at_the_measurement_count_once_they_may_work() -> None:
    """Otherwise each lease of the round would be declined as too slow, and only an accepted one measures it again."""
    pool = pool_of([40, 40, 40, 40])
    steer(pool, [1, 2, 3])
    await load(pool, one, other)
    assert pool.speed_with(one) == 40.0
    steer(pool, [])
    assert pool.speed_with(one) == 160.0, "those that were not measured count like the mean of the others"
    await load(pool, one, other)
    steer(pool, [0, 1])
    assert pool.speed_with(one) == 80.0, "while another round has the engine"
    steer(pool, [0, 1, 2, 3])
    assert pool.speed_with(one) == 160.0, "none may work: what they had"
