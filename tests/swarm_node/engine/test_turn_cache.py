"""Kept rows: bounded in bytes and time, used once, and only for the tokens that they hold."""

import pytest

from swarm_node.engine.decoder import SavedRow
from swarm_node.engine.turn_cache import KEPT_S, TurnCache

ROW = SavedRow(None, 3, 100)
TOKENS = [1, 2, 3]


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_row_is_used_once() -> None:
    cache = TurnCache(1000)
    cache.put(1, 0, TOKENS, ROW)
    assert cache.take(1, 1, [*TOKENS, 4]) is None, "of another sample"
    assert cache.take(2, 0, [*TOKENS, 4]) is None, "of another lease"
    assert cache.take(1, 0, [*TOKENS, 4]) is ROW
    assert cache.take(1, 0, [*TOKENS, 4]) is None


@pytest.mark.parametrize("tokens", [[1, 2, 4, 4], [1, 2], TOKENS, []], ids=["other", "shorter", "nothing new", "none"])
def test_a_row_with_other_tokens_is_not_used(tokens: list[int]) -> None:
    cache = TurnCache(1000)
    cache.put(1, 0, TOKENS, ROW)
    assert cache.take(1, 0, tokens) is None
    assert len(cache) == 0


@pytest.mark.parametrize(
    ("size_max_bytes", "kept"), [(0, []), (99, []), (100, [4]), (299, [3, 4]), (500, [0, 1, 2, 3, 4])]
)
def test_the_oldest_rows_make_room(size_max_bytes: int, kept: list[int]) -> None:
    cache = TurnCache(size_max_bytes)
    for seed in range(5):
        cache.put(seed, 0, TOKENS, ROW)
        cache.put(seed, 0, TOKENS, ROW)  # the same row again takes no more room
    assert [seed for seed in range(5) if cache.take(seed, 0, [*TOKENS, 4])] == kept


def test_rows_expire() -> None:
    clock = Clock()
    cache = TurnCache(1000, now=clock)
    cache.put(1, 0, TOKENS, ROW)
    clock.now = KEPT_S
    cache.put(2, 0, TOKENS, ROW)
    assert len(cache) == 2
    clock.now = KEPT_S + 1
    cache.shrink()
    assert [seed for seed in (1, 2) if cache.take(seed, 0, [*TOKENS, 4])] == [2]


def test_what_is_cleared_is_gone() -> None:
    cache = TurnCache(100)
    assert not cache.clear()
    cache.put(1, 0, TOKENS, ROW)
    assert cache.clear()
    cache.put(2, 0, TOKENS, ROW)
    assert cache.take(2, 0, [*TOKENS, 4]) is ROW, "its bytes are free again"
