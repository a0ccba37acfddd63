"""The shipped games by name.

- The meaning of a name with its parameters never changes: a changed game gets a new name.
- An unknown name or parameter is `unknown_task`: the operator mistyped, or this version is older than the settings.
"""

from dataclasses import fields
from typing import Any

from coordinator.environments.games.game import Game, Parameters
from coordinator.environments.games.holdem import Holdem
from coordinator.environments.games.limit_poker import Kuhn, Leduc
from coordinator.environments.games.sokoban import Sokoban
from protocol.errors import UnknownTask

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
