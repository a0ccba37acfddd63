"""Games of TextArena, alone and against scripted opponents."""

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest

from coordinator.environments import textarena_game
from protocol.errors import ConfigInvalid
from protocol.tasks import Problem
from tests.environments.playing import play, problems

GUESS: dict[str, Any] = {"id": "GuessTheNumber-v0"}
ROW: dict[str, Any] = {"id": "TicTacToe-v0", "players": 2}
OPPONENTS = str(Path(__file__).with_name("arena_opponents.py"))


needs_library = pytest.mark.skipif(
    importlib.util.find_spec("textarena") is None,
    reason="TextArena is not installed here; make test-environments has it",
)


@needs_library
def test_a_game_for_one_is_played_to_its_end() -> None:
    first, second, _ = problems(textarena_game, **GUESS)
    assert "Guess The Number" in first.prompt[0][1]

    for problem in (first, second):
        guesses = halving(problem)
        read, earned = play(textarena_game, problem, guesses, **GUESS)
        assert set(read) <= {"The target number is higher.", "The target number is lower.", None}
        assert (earned.score, earned.status) == (1.0, "ok")
        assert earned.components["turns"] == len(guesses)


def halving(problem: Problem) -> list[str]:
    """Return the turns of a policy that halves the range by the hints that it reads."""
    low, high, turns = 1, 20, list[str]()
    while True:
        guess = (low + high) // 2
        turns.append(f"I guess [{guess}]")
        last = play(textarena_game, problem, turns, **GUESS).read[-1]
        if last is None:
            return turns
        low, high = (guess + 1, high) if last == "The target number is higher." else (low, guess - 1)


@needs_library
def test_a_bad_move_is_explained_once_and_then_loses() -> None:
    first, *_ = problems(textarena_game, **GUESS)
    played = play(textarena_game, first, ["Perhaps seven?", "[99]"], **GUESS)
    assert "invalid move" in played.read[0]
    assert played.read[1] is None
    assert played.earned.status == "invalid"
    assert play(textarena_game, first, ["Perhaps seven?"], **GUESS).score == 0.0  # cut off


@needs_library
def test_an_opponent_moves_between_the_turns() -> None:
    games = problems(textarena_game, size=20, **ROW)
    opened = [game.prompt[0][1].count("placed their symbol") for game in games]
    assert set(opened) == {0, 1}  # in some games the opponent begins

    scripted = ROW | {"opponent": f"{OPPONENTS}:first_free"}
    begins = problems(textarena_game, size=20, **scripted)[opened.index(0)]
    won = play(textarena_game, begins, ["[4]", "[2]", "[6]"], **scripted)
    assert "placed their symbol (X) in cell 0" in won.read[0]
    assert "placed their symbol (X) in cell 1" in won.read[1]
    assert won.read[2] is None
    assert won.score == 1.0
    lost = play(textarena_game, begins, ["[4]", "[5]", "[8]"], **scripted)
    assert lost.read[2] is None
    assert lost.score == -1.0
    given = ROW | {"opponent": f"{OPPONENTS}:silent"}
    assert play(textarena_game, begins, ["[4]"], **given).score == 1.0


@needs_library
@pytest.mark.parametrize("game", [ROW, {"id": "KuhnPoker-v0", "players": 2}])
def test_the_same_turns_are_answered_the_same_and_chance_of_others_is_left_alone(game: dict[str, Any]) -> None:
    turns = ["[0]", "[check]", "[8]", "[bet]", "[4]", "[call]", "[2]", "[fold]"]
    assert problems(textarena_game, **game) == problems(textarena_game, **game)
    for problem in problems(textarena_game, **game):
        random.seed(1)
        before = random.getstate()
        first = play(textarena_game, problem, turns, **game)
        assert random.getstate() == before
        random.seed(2)
        assert play(textarena_game, problem, turns, **game) == first


@needs_library
@pytest.mark.parametrize("game", [{"id": "Nim-v0", "players": 2}, {"id": "ThreePlayerTicTacToe-v0", "players": 3}])
def test_opponents_without_a_plan_play_what_they_read(game: dict[str, Any]) -> None:
    for problem in problems(textarena_game, size=6, **game):
        assert "invalid move" not in problem.prompt[0][1]


@needs_library
def test_a_reason_instead_of_a_reward_is_an_invalid_move() -> None:
    countdown: dict[str, Any] = {"id": "Countdown-v0"}
    first, *_ = problems(textarena_game, **countdown)
    played = play(textarena_game, first, ["What?", "What?"], **countdown)
    assert played.read[-1] is None
    assert (played.score, played.earned.status) == (0.0, "invalid")


@needs_library
def test_a_wrong_setting_is_named() -> None:
    with pytest.raises(ConfigInvalid, match="no game 'TicTacTo-v9'") as caught:
        problems(textarena_game, id="TicTacTo-v9")
    assert "TicTacToe-v0" in str(caught.value.hint)
    with pytest.raises(ConfigInvalid, match="cannot be played with these parameters"):
        problems(textarena_game, id="TicTacToe-v0")
    with pytest.raises(ConfigInvalid, match="cannot be played with these parameters"):
        problems(textarena_game, **GUESS, args={"colour": "red"})
