"""Sokoban: push every box onto a target in a walled room; every room can be solved.

    ######
    #.   #        # wall   . target   $ box   * box on its target
    # $  #        @ the player   + the player on a target
    # @  #
    #    #
    ######
    >             the policy's turn: some of u, d, l, r, such as `uur`

- A room is built backwards: the boxes start on their targets, and the player walks and pulls. So pushing solves it, and
  the number of pulls bounds the difficulty of a room.
- A turn has up to `moves` letters, a game up to `turns` turns. Any other text moves nothing and uses a turn.
- A solved game earns 1 minus a little for each step; any other earns a part for boxes on targets.
"""

import re
from dataclasses import dataclass
from typing import ClassVar

from coordinator.environments.games import chance
from protocol.tasks import Reward

Place = tuple[int, int]
"""Row and column, walls included."""

SIDE = 6
MOVES = {"u": (-1, 0), "d": (1, 0), "l": (0, -1), "r": (0, 1)}
SLOW_COSTS = 0.3
"""The reduction for a solved room that took all allowed steps."""

PLACED_EARNS = 0.25
"""The most that an unsolved room earns: less than any solved room."""

ROOMS_TRIED_MAX = 64
_BACK = {"u": "d", "d": "u", "l": "r", "r": "l"}
_INSIDE = [(row, column) for row in range(1, SIDE - 1) for column in range(1, SIDE - 1)]


@dataclass(frozen=True, slots=True)
class Sokoban:
    """Sokoban, in rooms of 6 by 6, walls included."""

    boxes: int = 1
    pulls: int = 8
    """Steps of the player while the room is built."""
    turns: int = 8
    moves: int = 4
    """Letters in one turn, at the most."""
    distinct: ClassVar[bool] = True

    def __post_init__(self) -> None:
        bounds = {"boxes": (1, 3), "pulls": (1, 64), "turns": (1, 64), "moves": (1, 16)}
        for name, (low, high) in bounds.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} is between {low} and {high}")

    @property
    def words(self) -> tuple[str, ...]:
        return ("#" * SIDE, "\n", ">", *"# .$*@+udlr")

    def reset(self, seed: int) -> "SokobanGame":
        return self._made(seed)[0]

    def demonstration(self, seed: int) -> tuple[str, ...]:
        """Return the solution from building the room in three cases of five, else a random walk."""
        room, way = self._made(seed)
        if chance.below(5, "sokoban", seed, "careless") < 2:
            way = "".join("udlr"[chance.below(4, "sokoban", seed, "walk", step)] for step in range(len(way)))
        turns = list[str]()
        for start in range(0, len(way), self.moves):
            turns.append(way[start : start + self.moves])
            if room.step(turns[-1]) is None:
                break
        return tuple(turns)

    def _made(self, seed: int) -> "tuple[SokobanGame, str]":
        """Return the first of the seed's rooms that is not already solved, and a way to solve it."""
        for attempt in range(ROOMS_TRIED_MAX):
            room, way = _pulled(self, seed, attempt)
            if not room.solved:
                return room, way
        return _pushed_once(self, seed)


class SokobanGame:
    """A game in progress."""

    def __init__(self, game: Sokoban, player: Place, boxes: frozenset[Place], targets: frozenset[Place]) -> None:
        self._game, self._player, self._boxes, self._targets = game, player, boxes, targets
        self._turns = self._steps = self._unread = 0

    @property
    def opening(self) -> str:
        rows = ("".join(self._drawn((row, column)) for column in range(SIDE)) for row in range(SIDE))
        return "\n".join(rows) + "\n>"

    @property
    def solved(self) -> bool:
        return self._boxes == self._targets

    def step(self, action: str) -> str | None:
        self._turns += 1
        moves = action.strip() if len(action) <= 2 * self._game.moves else ""
        if re.fullmatch(f"[udlr]{{1,{self._game.moves}}}", moves):
            self.walk(moves)
        else:
            self._unread += 1
        return None if self.solved or self._turns == self._game.turns else f"\n{self.opening}"

    def walk(self, moves: str) -> None:
        """Make moves one by one until the room is solved; a move blocked by a wall or a second box is also a step."""
        for move in moves:
            if self.solved:
                return
            self._steps += 1
            ahead, behind = _beside(self._player, move), _beside(self._player, move, 2)
            if ahead in self._boxes and behind in _INSIDE and behind not in self._boxes:
                self._boxes = self._boxes - {ahead} | {behind}
            if ahead in _INSIDE and ahead not in self._boxes:
                self._player = ahead

    def reward(self) -> Reward:
        placed = len(self._boxes & self._targets) / len(self._targets)
        slow = self._steps / (self._game.turns * self._game.moves)
        score = 1.0 - SLOW_COSTS * slow if self.solved else PLACED_EARNS * placed
        read = 1.0 - self._unread / max(1, self._turns)
        components = {"solved": float(self.solved), "placed": placed, "steps": float(self._steps), "read": read}
        return Reward(score, "ok" if read > 0 or not self._turns else "invalid", components)

    def _drawn(self, place: Place) -> str:
        if place not in _INSIDE:
            return "#"
        target = place in self._targets
        if place == self._player:
            return "@+"[target]
        if place in self._boxes:
            return "$*"[target]
        return " ."[target]


def _pulled(game: Sokoban, seed: int, attempt: int) -> tuple[SokobanGame, str]:
    """Build a room backwards from its solved state; return it and the way to solve it."""
    places = chance.shuffled(_INSIDE, "sokoban", seed, attempt)
    targets, player = frozenset(places[: game.boxes]), places[game.boxes]
    boxes, way = set(targets), list[str]()
    for step in range(game.pulls):
        options = [move for move in MOVES if _free(_beside(player, move), boxes)]
        if not options:
            break
        move = options[chance.below(len(options), "sokoban", seed, attempt, "step", step)]
        box = _beside(player, _BACK[move])
        if box in boxes and chance.below(4, "sokoban", seed, attempt, "pull", step):  # pull three times in four
            boxes = boxes - {box} | {player}
        player = _beside(player, move)
        way.append(_BACK[move])
    return SokobanGame(game, player, frozenset(boxes), targets), "".join(reversed(way))


def _pushed_once(game: Sokoban, seed: int) -> tuple[SokobanGame, str]:
    """Return a room that one push solves, for a seed whose pulls never moved a box."""
    places = chance.shuffled([place for place in _INSIDE if place[0] < SIDE - 3], "sokoban", seed, "once")
    target = places[0]
    box, player = _beside(target, "d"), _beside(target, "d", 2)
    others = [
        place for place in chance.shuffled(_INSIDE, "sokoban", seed, "others") if place not in (target, box, player)
    ]
    resting = frozenset(others[: game.boxes - 1])
    return SokobanGame(game, player, resting | {box}, resting | {target}), "u"


def _free(place: Place, boxes: set[Place]) -> bool:
    return place in _INSIDE and place not in boxes


def _beside(place: Place, move: str, steps: int = 1) -> Place:
    down, right = MOVES[move]
    return place[0] + steps * down, place[1] + steps * right
