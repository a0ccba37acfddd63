"""Episodes in a process: kept from turn to turn, and played again if they are not there."""

import asyncio
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from coordinator.environments.host import Broken, EpisodeHost, TurnQuestion
from protocol.tasks import Problem

PROBLEM = Problem("begin", columns={"secret": 3})


class Counts:
    """Counts its turns up to the problem's secret."""

    made: ClassVar[list["Counts"]] = []

    def __init__(self, problem: Problem, **parameters: Any) -> None:
        self.secret, self.parameters, self.turns = problem.columns["secret"], parameters, list[str]()
        Counts.made.append(self)

    def step(self, turn: str) -> str | None:
        self.turns.append(turn)
        return f"{len(self.turns)} {turn}" if len(self.turns) < self.secret else None

    def reward(self) -> float:
        return float(len(self.turns))


@pytest.fixture
def host() -> Iterator[EpisodeHost]:
    Counts.made.clear()
    made = EpisodeHost(Counts, {"hint": 7}, running_max=2)
    yield made
    made.close()


def asked(*turns: list[str] | None, over: bool = False, key: str = "group") -> TurnQuestion:
    return TurnQuestion(key, PROBLEM, turns, [over] * len(turns))


def test_an_episode_goes_on_where_it_was(host: EpisodeHost) -> None:
    assert [each and each.read for each in host.play(asked(["a"], ["b"]))] == [("1 a",), ("1 b",)]
    (first, second) = host.play(asked(["a", "c"], None))
    assert first is not None
    assert (first.read, first.earned, second) == (("2 c",), None, None)
    (ended,) = host.play(asked(["a", "c", "d"]))
    assert ended is not None
    assert (ended.read, ended.earned) == ((None,), 3.0)
    assert len(Counts.made) == 2
    assert Counts.made[0].parameters == {"hint": 7}


def test_an_episode_that_is_not_here_is_played_again(host: EpisodeHost) -> None:
    (answer,) = host.play(asked(["a", "b"]))
    assert answer is not None
    assert answer.read == ("1 a", "2 b")


def test_an_answer_that_was_lost_is_given_again(host: EpisodeHost) -> None:
    host.play(asked(["a"]))
    host.play(asked(["a", "b"]))
    (again,) = host.play(asked(["a", "b"]))
    assert again is not None
    assert again.read == ("1 a", "2 b")


@pytest.mark.parametrize("over", [False, True])
def test_an_instance_that_had_another_turn_is_not_used(host: EpisodeHost, over: bool) -> None:
    """A commit failed after the environment had the turn, or another node has begun the group again."""
    host.play(asked(["a"]))
    host.play(asked(["a", "lost"]))
    (answer,) = host.play(asked(["a", "b"], over=over))
    assert answer is not None
    assert answer.read == ("1 a", "2 b")
    (later,) = host.play(asked(["a", "other", "c"], over=over))
    assert later is not None
    assert later.read == ("1 a", "2 other", None)


def test_an_episode_that_can_have_no_further_turn_is_judged_as_it_stands(host: EpisodeHost) -> None:
    (cut,) = host.play(asked(["a"], over=True))
    assert cut is not None
    assert (cut.read, cut.earned) == (("1 a",), 1.0)
    host.play(asked(["a"], key="other"))
    (later,) = host.play(asked(["a"], over=True, key="other"))
    assert later is not None
    assert (later.read, later.earned) == ((), 1.0), "its turn was played before: only the reward is asked for"
    assert len(Counts.made) == 2


def test_the_instance_used_longest_ago_makes_room(host: EpisodeHost) -> None:
    for key in "abc":
        host.play(asked(["x"], key=key))
    host.play(asked(["x", "y"], key="c"))
    assert len(Counts.made) == 3
    host.play(asked(["x", "y"], key="a"))
    assert len(Counts.made) == 4


def test_an_episode_that_ends_earlier_than_before_is_broken(host: EpisodeHost) -> None:
    with pytest.raises(Broken, match="a replay must answer the same"):
        host.play(asked(["a", "b", "c", "d"]))


class Waits:
    """Waits for the other sample of its group."""

    both: ClassVar[list[asyncio.Event]] = []

    def __init__(self, problem: Problem) -> None:
        self.own = asyncio.Event()
        Waits.both.append(self.own)

    async def step(self, turn: str) -> None:
        self.own.set()
        for event in Waits.both:
            await event.wait()

    async def reward(self) -> dict[str, float]:
        return {"score": 1.0}


def test_coroutines_of_a_group_run_at_the_same_time() -> None:
    host = EpisodeHost(Waits, {})
    assert [each and each.earned for each in host.play(asked(["a"], ["b"]))] == [{"score": 1.0}] * 2
    host.close()
