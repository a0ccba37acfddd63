"""Long groups to fast nodes: as a pure choice, in the store, and nobody is passed over for ever."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rules.lengths import (
    ALIKE,
    OVERTAKEN_MAX,
    REMEMBERED,
    LengthStatistics,
    WaitingGroup,
    expected,
    neighbourhood,
    pick,
)
from coordinator.store import tables
from coordinator.transactions import foresight
from protocol.wire.signing import NodeKey
from protocol.work.lease import Lease
from protocol.work.rollout import Sample, pack_logprobs, pack_tokens, unpack_tokens
from tests.coordinator.world import END, World, answer

LONG, SHORT = 400.0, 100.0
MIXED = [WaitingGroup(number, LONG if number % 4 == 0 else SHORT) for number in range(16)]


def test_the_longest_go_to_the_fastest_and_the_shortest_to_the_slowest() -> None:
    assert pick(MIXED, 4, speed=100.0, window=16) == [0, 4, 8, 12]
    assert set(pick(MIXED, 4, speed=0.01, window=16)).isdisjoint({0, 4, 8, 12})
    assert set(pick(MIXED, 4, speed=1.0, window=16)).isdisjoint({0, 4, 8, 12}), "from the middle"


@pytest.mark.parametrize("lengths", [[0.0] * 5, [100.0] * 5, [100.0, 100.0 * ALIKE, 0.0, 0.0, 110.0]])
def test_what_is_alike_or_unknown_goes_in_its_order(lengths: list[float]) -> None:
    waiting = [WaitingGroup(number, length) for number, length in enumerate(lengths)]
    for speed in (0.1, 1.0, 10.0):
        assert pick(waiting, 2, speed=speed, window=5) == [0, 1]


@pytest.mark.parametrize(("count", "taken"), [(-1, 0), (0, 0), (1, 1), (15, 15), (16, 16), (17, 16), (99, 16)])
def test_as_many_as_are_asked_for_and_are_there(count: int, taken: int) -> None:
    assert len(pick(MIXED, count, speed=3.0, window=16)) == taken
    assert pick([], count, speed=3.0, window=16) == []


@given(
    st.lists(st.tuples(st.integers(0, 300), st.floats(0, 1e4)), unique_by=lambda one: one[0], max_size=40),
    st.integers(0, 50),
    st.floats(0, 1e9),
    st.integers(1, 20),
)
def test_a_choice_is_of_what_waits_once_each_and_the_overtaken_come_first(
    found: list[tuple[int, float]], count: int, speed: float, window: int
) -> None:
    waiting = [WaitingGroup(*one) for one in sorted(found)]
    chosen = pick(waiting, count, speed=speed, window=window)
    numbers = [one.group_no for one in waiting]
    assert len(chosen) == len(set(chosen)) == min(count, len(numbers) if window <= count else max(len(chosen), 0))
    assert set(chosen) <= set(numbers)
    overtaken = [number for number in numbers if max(numbers) - number > OVERTAKEN_MAX * window][: max(0, count)]
    assert chosen[: len(overtaken)] == overtaken


def test_a_group_that_only_slow_nodes_could_take_is_not_passed_over_for_ever() -> None:
    """A swarm of slow nodes alone: the one long group is taken when enough newer ones have overtaken it."""
    window, waiting, taken = 4, [WaitingGroup(0, LONG), *(WaitingGroup(n, SHORT) for n in range(1, 4))], list[int]()
    while 0 not in taken:
        taken += pick(waiting, 1, speed=0.01, window=window)
        waiting = [one for one in waiting if one.group_no not in taken]
        waiting.append(WaitingGroup(len(taken) + 3, SHORT))
        assert len(taken) <= (OVERTAKEN_MAX + 1) * window + 1


def test_a_mean_follows_what_is_seen_lately() -> None:
    seen = LengthStatistics()
    for tokens in [100.0] * 50:
        seen = seen.after(tokens)
    assert (seen.mean, seen.groups) == (100.0, REMEMBERED)
    for tokens in [200.0] * 50:
        seen = seen.after(tokens)
    assert seen.mean == pytest.approx(200, rel=0.05)


def test_the_prompt_itself_says_more_than_its_neighbours() -> None:
    assert expected(LengthStatistics(10, 1), LengthStatistics(99, 9)) == 10
    assert expected(None, LengthStatistics(99, 9)) == expected(LengthStatistics(), LengthStatistics(99, 9)) == 99
    assert expected(None, None) == 0


def test_neighbours_are_of_about_the_same_length() -> None:
    assert len({neighbourhood(count) for count in range(1, 17)}) == 16
    assert neighbourhood(1000) == neighbourhood(1001) != neighbourhood(1400)
    assert len({neighbourhood(count) for count in range(1, 100_000)}) < 200


def sampled(key: NodeKey, lease: Lease, length: int) -> bytes:
    """An answer of so many tokens."""
    tokens = [7] * (length - 1) + [END]
    sample = Sample(tokens=pack_tokens(tokens), logprobs=pack_logprobs([-0.5] * length), finish="stop")
    return answer(key, lease, samples=(sample,) * lease.samples)


def number_of(lease: Lease) -> int:
    return int(unpack_tokens(lease.prompt)[0]) - 10


@pytest.fixture
def seeing(tmp_path: Path) -> World:
    """Prompts of two lengths: every fourth is long, and so are its answers."""
    world = World(tmp_path, staleness=20, size=4, lookahead=8)
    world.draw = type(world.draw)(
        prompt=lambda source: [source.number + 10] * (9 if source.number % 4 == 0 else 2),
        lease_id=world.draw.lease_id,
        seed=world.draw.seed,
    )
    world.publish(1, 0)
    return world


def work(world: World, key: NodeKey, groups: int, ms_per_token: int) -> list[int]:
    """Take and answer groups one after the other; which ones."""
    done = []
    for _ in range(groups):
        lease = world.lease(key)
        number = number_of(lease)
        length = 4 if number % 4 == 0 else 1
        world.now_ms += ms_per_token * length
        assert world.submit(key, sampled(key, lease, length)).outcome == "accepted"
        done.append(number)
    return done


def test_prompts_like_those_that_were_long_go_to_the_fast_node(seeing: World) -> None:
    fast, slow = seeing.join(1), seeing.join(2)
    work(seeing, fast, 8, 1)
    work(seeing, slow, 8, 100)
    of_fast, of_slow = work(seeing, fast, 3, 1), work(seeing, slow, 3, 100)
    assert all(number % 4 == 0 for number in of_fast)
    assert all(number % 4 for number in of_slow)
    assert seeing.run(foresight.speed, fast.node_id) > 1 > seeing.run(foresight.speed, slow.node_id)
    seeing.database.close()


def test_what_is_known_of_lengths_outlives_a_restart(seeing: World) -> None:
    fast, slow = seeing.join(1), seeing.join(2)
    work(seeing, fast, 8, 1)
    work(seeing, slow, 8, 100)
    before = seeing.rows(tables.lengths)
    seeing.reopen()
    assert seeing.rows(tables.lengths) == before
    assert all(number % 4 == 0 for number in work(seeing, fast, 2, 1))
    seeing.database.close()


def test_every_prompt_is_given_once_whatever_the_order(seeing: World) -> None:
    fast, slow = seeing.join(1), seeing.join(2)
    given = [number for _ in range(6) for key, ms in ((fast, 1), (slow, 100)) for number in work(seeing, key, 3, ms)]
    assert len(given) == len(set(given)) == 36
    left = {number for number, state in seeing.group_states().items() if state == "open"}
    assert set(given) | left == set(range(max(given) + 1)) | left, "what was not given waits"
    seeing.database.close()
