"""Games of TextArena: alone, or against a scripted opponent.

    [task.parameters]
    id = "TicTacToe-v0"
    args = {}                          parameters of the game
    players = 2                        1 if the game is for one
    opponent = "my_task.py:opponent"   called as opponent(what it reads, chance) for all other players;
                                       without it, a random move of those in brackets in what it reads
    chat = true                        the prompt is a message; if false, text

- The policy's seat is drawn from the seed. It reads what is new since its last turn.
- TextArena draws from Python's global chance. Each episode has its own, which is there only during its moves.
- The reward is the game's own. An episode that is cut off has earned nothing.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from coordinator.environments.adapting import SPLIT_PARTS, Row, library, operator_object, seeds
from protocol.errors import ConfigInvalid
from protocol.tasks import Problem, Reward

OPPONENT_MOVES_MAX = 1000
"""The moves of opponents in a row, after which the game is broken."""

Opponent = Callable[[str, random.Random], str]


def problems(split: str, seed: int, size: int, *, chat: bool = True, **parameters: Any) -> Iterator[Row]:
    """Return a game for each seed of the split; its prompt is what the policy's player reads first."""
    for drawn in seeds(split, seed, size):
        opening = _Game(drawn, **parameters).read()
        yield {"prompt": [{"role": "user", "content": opening}] if chat else opening, "seed": drawn}


class _Game:
    """A game in progress, in which all players but the policy's have moved."""

    def __init__(
        self, seed: int, id: str, args: Mapping[str, Any] | None = None, players: int = 1, opponent: str = ""
    ) -> None:
        arena = library("textarena", "textarena")
        if id not in (known := arena.envs.registration.ENV_REGISTRY):
            near = sorted(name for name in known if id.partition("-")[0].lower() in name.lower())
            hint = f"Near it: {', '.join(near[:8])}." if near else "The library's README lists its games."
            raise ConfigInvalid(f"TextArena has no game {id!r}.", hint=hint)
        self._opponent: Opponent = operator_object(opponent) if opponent else _RandomMoves()
        self._chance = random.Random(seed)  # of the opponent
        self._state = random.Random(seed).getstate()
        self.seat = seed // SPLIT_PARTS % players  # the last digit is the split's
        self.done = False
        with self._own_chance():
            self._game = self._reset(arena, id, args or {}, players, seed)
            self._inner = self._game
            while isinstance(self._inner, arena.core.Wrapper):  # they would repeat all that was read before
                self._inner = self._inner.env
            self._opponents_move()

    @staticmethod
    def _reset(arena: ModuleType, id: str, args: Mapping[str, Any], players: int, seed: int) -> Any:
        try:
            game = arena.make(id, **args)
            game.reset(num_players=players, seed=seed)
        except LookupError as error:
            if "nltk" not in str(error):
                raise
            raise ConfigInvalid(
                f"TextArena's {id} needs word lists.",
                hint="python -m nltk.downloader words averaged_perceptron_tagger_eng",
            ) from error
        except Exception as error:  # games raise any error for parameters or players that they do not like
            said = f"{type(error).__name__}: {error}"
            raise ConfigInvalid(f"TextArena's {id} cannot be played with these parameters: {said}.") from error
        return game

    @property
    def state(self) -> Any:
        return self._inner.state

    def move(self, action: str) -> None:
        with self._own_chance():
            self.done, _ = self._game.step(action=action)
            self._opponents_move()

    def _opponents_move(self) -> None:
        for _ in range(OPPONENT_MOVES_MAX):
            if self.done or self.state.current_player_id == self.seat:
                return
            self.done, _info = self._game.step(action=self._opponent(self.read(), self._chance))
        raise ConfigInvalid(
            f"The opponents made {OPPONENT_MOVES_MAX} moves, and the policy's turn did not come.",
            hint="Set task.parameters.opponent to one that knows the game.",
        )

    def read(self) -> str:
        """Return what the player whose turn it is has not read yet."""
        _, seen = self._inner.get_observation()
        return "\n".join(str(text) for sender, text, _ in seen if sender != self.state.current_player_id)

    @contextmanager
    def _own_chance(self) -> Iterator[None]:
        outer = random.getstate()
        random.setstate(self._state)
        try:
            yield
        finally:
            self._state = random.getstate()
            random.setstate(outer)


class _RandomMoves:
    """An opponent without a plan: it knows the moves in brackets that it has read."""

    def __init__(self) -> None:
        self._known = dict[str, None]()

    def __call__(self, read: str, chance: random.Random) -> str:
        """Return a move of the last line that says which are available; else of all that were read now, or before."""
        lines = [(line, moves) for line in read.splitlines() if (moves := re.findall(r"\[[^\[\]\n]+\]", line))]
        offered = [moves for line, moves in lines if re.search("available|legal|valid", line, re.IGNORECASE)]
        now = [move for _, moves in lines for move in moves]
        self._known.update(dict.fromkeys(now))
        chosen: str = chance.choice(offered[-1] if offered else now or list(self._known) or ["[pass]"])
        return chosen


class TextArenaEpisode:
    """A game of the policy."""

    def __init__(self, problem: Problem, chat: bool = True, **parameters: Any) -> None:
        self._game = _Game(int(problem.columns["seed"]), **parameters)
        self._game.read()  # the prompt

    def step(self, turn: str) -> str | None:
        self._game.move(turn)
        return None if self._game.done else self._game.read()

    def reward(self) -> Reward:
        state, seat = self._game.state, self._game.seat
        earned = (state.rewards or {}).get(seat, 0.0)
        # Some games give the reason of an invalid move as its reward.
        fault = bool(state.game_info[seat].get("invalid_move")) or isinstance(earned, str)
        return Reward(
            0.0 if isinstance(earned, str) else float(earned),
            "invalid" if fault else "ok",
            {"turns": float(state.turn)},
        )


Environment = TextArenaEpisode
