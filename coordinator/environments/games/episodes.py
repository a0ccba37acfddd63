"""The shipped games, by name and as an environment: the problems of the three splits, and an episode of each.

- The meaning of a name with its parameters never changes: a changed game gets a new name.
- An unknown name or parameter is `unknown_task`: the operator mistyped, or this version is older than the settings.
- Game i of a split has a seed that is a hash of the split and i. If the opening identifies a game, its hash must also
  give this split, so that two seeds of one game cannot be in two splits.
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from coordinator.environments.games import chance
from coordinator.environments.games.game import Game, Parameters
from coordinator.environments.games.holdem import Holdem
from coordinator.environments.games.limit_poker import Kuhn, Leduc
from coordinator.environments.games.sokoban import Sokoban
from protocol.errors import UnknownTask
from protocol.tasks import Problem, Reward, Split

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
