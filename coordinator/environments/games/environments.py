"""The built-in environments by name; nodes play no others.

- The meaning of a name with its parameters never changes: a changed environment gets a new name.
- An unknown name or parameter is `unknown_environment`: the node is older than its round, or the operator mistyped.
"""

from dataclasses import fields
from typing import Any

from protocol.errors import UnknownEnvironment
from coordinator.environments.games.environment import Parameters, Playable
from coordinator.environments.games.holdem import Holdem
from coordinator.environments.games.limit_poker import Kuhn, Leduc
from coordinator.environments.games.sokoban import Sokoban

ENVIRONMENTS: dict[str, type[Any]] = {"holdem": Holdem, "kuhn": Kuhn, "leduc": Leduc, "sokoban": Sokoban}


def environment(name: str, parameters: Parameters) -> Playable:
    """Return the built-in environment `name`, or raise `UnknownEnvironment`."""
    if name not in ENVIRONMENTS:
        raise UnknownEnvironment(
            f"This version has no environment {name[:40]!r}.",
            hint=f"Built in: {', '.join(sorted(ENVIRONMENTS))}. If the round's version is newer, update this one.",
        )
    kind = ENVIRONMENTS[name]
    expected: dict[str, Any] = {field.name: field.default for field in fields(kind)}
    for key, value in parameters.items():
        if key not in expected or type(value) is not type(expected[key]):
            defaults = ", ".join(f"{other} = {default!r}" for other, default in expected.items()) or "none"
            raise UnknownEnvironment(
                f"{name} does not accept the parameter {key[:40]} = {str(value)[:40]!r}.",
                hint=f"Parameters with their defaults: {defaults}.",
            )
    try:
        built: Playable = kind(**dict(parameters))
    except ValueError as error:
        raise UnknownEnvironment(f"{name}: {error}.", hint="docs/tasks.md has the bounds.") from None
    return built


def described(name: str) -> str:
    """Return the description of a built-in environment, with the defaults of its parameters."""
    kind = ENVIRONMENTS[name]
    about = (kind.__doc__ or "").strip().partition("\n")[0].rstrip(".")
    taken = ", ".join(f"{field.name} = {field.default!r}" for field in fields(kind))
    return f"a game of several turns: {about}" + (f" ({taken})" if taken else "")


def names() -> tuple[str, ...]:
    """Return the names of all built-in environments."""
    return tuple(sorted(ENVIRONMENTS))
