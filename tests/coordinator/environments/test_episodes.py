"""Which games of an environment are trained on, and which are kept apart."""

from dataclasses import replace
from typing import Literal, cast

import pytest

from protocol.tasks import Episodes, task
from coordinator.environments.games.sokoban import Sokoban, SokobanGame

EASY = {"pulls": 3, "turns": 2}
TASK = cast(Episodes, task("sokoban", parameters={**EASY, "held_out": 50}))


class Counting(Sokoban):
    """Sokoban that counts its rooms."""

    made = 0

    def reset(self, seed: int) -> SokobanGame:
        type(self).made += 1
        return super().reset(seed)


def test_one_held_out_game_costs_no_other() -> None:
    """Each lease of an evaluation and each answer to one asks for a single game."""
    counted = replace(TASK, environment=Counting(**EASY))
    alone = counted.games("held_out")[3]
    cost, Counting.made = Counting.made, 0
    assert list(counted.games("held_out"))[3] == alone
    assert cost < Counting.made / 10


@pytest.mark.parametrize("split", ["held_out", "validation"])
def test_games_and_problems_of_a_split_belong_together(split: Literal["held_out", "validation"]) -> None:
    games, problems = TASK.games(split), TASK.problems(split)
    assert [problem.columns["seed"] for problem in problems] == [game.seed for game in games]
    assert games[-1] == games[49] == list(games)[49]
    assert list(games[3:6]) == [games[3], games[4], games[5]]


@pytest.mark.parametrize("number", [50, -51])
def test_a_game_beyond_the_split_is_none(number: int) -> None:
    with pytest.raises(IndexError):
        TASK.games("held_out")[number]
