"""The split of an environment's games: those that are trained on, and those that are kept apart."""

from typing import Any

import pytest

from coordinator.environments.games.episodes import GameEpisode, open_game, problems
from coordinator.environments.games.sokoban import Sokoban
from protocol.errors import UnknownTask
from protocol.tasks import Problem, Split

EASY: dict[str, Any] = {"game": "sokoban", "pulls": 8, "turns": 2}
SPLITS: tuple[Split, ...] = ("train", "validation", "held_out")


def rows(split: Split, size: int = 40, seed: int = 0) -> list[dict[str, Any]]:
    return list(problems(split, seed, size, **EASY))


def test_rooms_of_two_splits_never_meet() -> None:
    prompts = [row["prompt"] for split in SPLITS for row in rows(split)]
    assert len(prompts) == len(set(prompts)) == 120


def test_the_rounds_seed_orders_the_train_split_alone() -> None:
    assert rows("train", seed=1) != rows("train")
    assert rows("held_out", seed=1) == rows("held_out")
    assert rows("train", 10) == rows("train")[:10]


def test_an_episode_is_the_game_of_its_problem() -> None:
    row = rows("train", 1)[0]
    episode = GameEpisode(Problem(row["prompt"], columns={"seed": row["seed"]}), **EASY)
    play = Sokoban(pulls=8, turns=2).reset(row["seed"])
    assert row["prompt"] == play.opening
    assert [episode.step("u"), episode.step("d")] == [play.step("u"), play.step("d")]
    assert episode.reward() == play.reward()


@pytest.mark.parametrize(
    ("name", "parameters", "said"),
    [
        ("nethack", {}, "no game 'nethack'"),
        ("kuhn", {"rule": 1}, "does not accept the parameter rule"),
        ("kuhn", {"rules": "1"}, "does not accept the parameter rules"),
        ("kuhn", {"rules": 2}, "rules is 0 or 1"),
    ],
)
def test_unknown_games_and_parameters_are_named(name: str, parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(UnknownTask, match=said):
        open_game(name, parameters)
