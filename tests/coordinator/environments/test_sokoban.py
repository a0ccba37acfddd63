"""Sokoban: every room can be solved, nothing passes through walls or boxes, and hostile turns change nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.environments.games.sokoban import SIDE, Sokoban

SEEDS = st.integers(0, 2**63 - 1)
GAMES = st.builds(Sokoban, boxes=st.integers(1, 3), pulls=st.integers(1, 30))


@given(GAMES, SEEDS)
def test_every_room_is_solvable_by_the_way_it_was_made(game: Sokoban, seed: int) -> None:
    room, way = game._made(seed)
    assert not room.solved
    room.walk(way)
    assert room.solved


@given(GAMES, SEEDS, st.lists(st.text("udlr", min_size=1, max_size=4), max_size=12))
def test_nothing_leaves_the_room_or_stands_on_something_else(game: Sokoban, seed: int, turns: list[str]) -> None:
    room = game.reset(seed)
    ended = False
    for turn in turns:
        ended = ended or room.step(turn) is None
        rows = room.opening.splitlines()[:SIDE]
        text = "".join(rows)
        assert [len(row) for row in rows] == [SIDE] * SIDE
        assert rows[0] == rows[-1] == "#" * SIDE
        assert {row[0] + row[-1] for row in rows} == {"##"}
        assert text.count("$") + text.count("*") == game.boxes
        assert text.count(".") + text.count("*") + text.count("+") == game.boxes
        assert text.count("@") + text.count("+") == 1
        if ended:
            break
    assert 0.0 <= room.reward().score <= 1.0


def test_the_player_to_imitate_knows_the_way_more_often_than_not_and_not_always() -> None:
    game, found = Sokoban(pulls=3, turns=2, moves=2), 0
    for seed in range(400):
        room = game.reset(seed)
        over = [room.step(turn) is None for turn in game.demonstration(seed)]
        assert not any(over[:-1])
        found += room.solved
    assert 0.6 < found / 400 < 0.75  # three times in five, and by chance


def test_a_push_moves_a_box_and_a_wall_or_a_second_box_stops_it() -> None:
    game = Sokoban(boxes=2)
    room = type(game.reset(0))(game, (3, 1), frozenset({(3, 2), (2, 1)}), frozenset({(3, 4), (1, 4)}))
    room.walk("rrr")  # twice pushed to the wall, then stopped
    assert room.opening.splitlines()[3] == "#  @*#"
    room = type(room)(game, (3, 1), frozenset({(3, 2), (3, 3)}), frozenset({(1, 3), (1, 4)}))
    room.walk("r")
    assert room.opening.splitlines()[3] == "#@$$ #"


def test_a_solved_room_earns_more_the_fewer_steps_it_took_and_always_more_than_an_unsolved_one() -> None:
    game = Sokoban(turns=2, moves=4)
    room = type(game.reset(0))(game, (3, 1), frozenset({(3, 2)}), frozenset({(3, 3)}))
    slow = type(room)(game, (3, 1), frozenset({(3, 2)}), frozenset({(3, 3)}))
    assert room.step("r") is None
    assert slow.step("lluu") is not None
    assert slow.reward().score == 0.0
    assert slow.step("ddrr") is None
    assert 1.0 > room.reward().score > slow.reward().score >= 0.7


@pytest.mark.parametrize("said", ["", "x", "udlrudlr", "U", "up", "u d", "u\n\nd", "ｕ", "r" * 10_000])
def test_what_is_no_move_moves_nothing_and_uses_a_turn_up(said: str) -> None:
    room = Sokoban(turns=2).reset(3)
    before = room.opening
    assert room.step(said) == f"\n{before}"
    assert room.step(said) is None
    assert room.reward().status == "invalid"
