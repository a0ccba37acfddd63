"""The shipped games, by name and as an environment: their interface, the problems of three splits, and their episodes.

    play = open_game("leduc", {"opponent": "rule"}).reset(seed)
    play.opening                      the text before the policy's first turn
    play.step("raise")                the text before its next turn, or None at the end
    play.reward()                     the reward of the game so far

- A game is a deterministic state machine of text. All chance is a function of the seed and of the actions: a replay of
  the same actions gives the same game on any machine. So there is no global randomness, no clock, and no decision by a
  float.
- An action is any text of the policy. A meaningless one has a defined effect; no text raises an exception.
- The texts of a game never contain text of the policy, so nobody can put a special token into them.
- A game has a bounded number of turns. One that was cut off is judged as if its player had given up.
- The meaning of a name with its parameters never changes: a changed game gets a new name.
- An unknown name or parameter is `unknown_task`: the operator mistyped, or this version is older than the settings.
- Game i of a split has a seed that is a hash of the split and i. If the opening identifies a game, its hash must also
  give this split, so that two seeds of one game cannot be in two splits.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, Protocol

from coordinator.environments.games import chance
from coordinator.environments.games.holdem import Holdem
from coordinator.environments.games.limit_poker import Kuhn, Leduc
from coordinator.environments.games.sokoban import Sokoban
from protocol.errors import UnknownTask
from protocol.tasks import Problem, Reward, Split

Parameters = Mapping[str, int | str]


class Play(Protocol):
    """A game in progress."""

    @property
    def opening(self) -> str:
        """Return the text that the policy reads before its first turn."""

    def step(self, action: str) -> str | None:
        """Take a turn; return the text before the next turn, or None if this turn was the last."""

    def reward(self) -> Reward:
        """Return the reward of the whole game, with its named components."""


class Game(Protocol):
    """A game with its parameters."""

    @property
    def words(self) -> tuple[str, ...]:
        """Return pieces of its text that a small tokenizer should have as single tokens."""

    @property
    def distinct(self) -> bool:
        """Return True if an opening identifies its problem, so that train and held-out openings must differ."""

    def reset(self, seed: int) -> Play:
        """Return the game of a seed, which is any integer of 63 bits."""

    def demonstration(self, seed: int) -> tuple[str, ...]:
        """Return the turns of a player that uses the right format, and plays badly."""


GAMES: dict[str, type[Any]] = {"holdem": Holdem, "kuhn": Kuhn, "leduc": Leduc, "sokoban": Sokoban}


def open_game(name: str, parameters: Parameters) -> Game:
    """Return the game `name`, or raise `UnknownTask`."""
    if name not in GAMES:
        raise UnknownTask(f"There is no game {name[:40]!r}.", hint=f"Built in: {', '.join(sorted(GAMES))}.")
    kind = GAMES[name]
    expected: dict[str, Any] = {field.name: field.default for field in fields(kind)}
    for key, value in parameters.items():
        if key not in expected or type(value) is not type(expected[key]):
            defaults = ", ".join(f"{other} = {default!r}" for other, default in expected.items()) or "none"
            raise UnknownTask(
                f"{name} does not accept the parameter {key[:40]} = {str(value)[:40]!r}.",
                hint=f"Parameters with their defaults: {defaults}.",
            )
    try:
        built: Game = kind(**dict(parameters))
    except ValueError as error:
        raise UnknownTask(f"{name}: {error}.", hint="docs/environments.md has the bounds.") from None
    return built


def described(name: str) -> str:
    """Return the description of a game, with the defaults of its parameters."""
    kind = GAMES[name]
    about = (kind.__doc__ or "").strip().partition("\n")[0].rstrip(".")
    taken = ", ".join(f"{field.name} = {field.default!r}" for field in fields(kind))
    return f"a game of several turns: {about}" + (f" ({taken})" if taken else "")


SPLIT_PARTS = 10
"""A tenth of the games is held out, another tenth is for validation."""

ATTEMPTS = 4
"""Seeds that are tried for each game of a split; most small rooms come up again."""

_OF_PART: dict[int, Split] = {0: "held_out", 1: "validation"}


class GameEpisode:
    """A game in progress."""

    def __init__(self, problem: Problem, *, game: str, **parameters: Any) -> None:
        self._play = open_game(game, parameters).reset(int(problem.columns["seed"]))

    def step(self, turn: str) -> str | None:
        return self._play.step(turn)

    def reward(self) -> Reward:
        return self._play.reward()


def problems(split: Split, seed: int, size: int, *, game: str, **parameters: Any) -> Iterator[dict[str, Any]]:
    """Yield `size` games of a split, or fewer if it has no more; `seed` orders the train split."""
    rules, seen, found = open_game(game, parameters), set[str](), 0
    for number in range(ATTEMPTS * size):
        of_game = seed_of(game, rules, split, seed, number)
        opening = rules.reset(of_game).opening
        if not (rules.distinct and opening in seen):
            seen.add(opening)
            found += 1
            yield {"prompt": opening, "seed": of_game}
        if found == size:
            return


def seed_of(name: str, rules: Game, split: Split, order: int, number: int) -> int:
    """Return the seed of game `number` of a split."""
    attempt = 0
    while True:
        seed = chance.word(name, split, order if split == "train" else 0, number, attempt) >> 1
        if not rules.distinct or _split(name, rules, seed) == split:
            return seed
        attempt += 1


def _split(name: str, rules: Game, seed: int) -> Split:
    return _OF_PART.get(chance.below(SPLIT_PARTS, "split", name, rules.reset(seed).opening), "train")
