"""The environments that are built in, by name; nodes play no others.

- What a name with its parameters means never changes: a change gets a new name.
- An unknown name or parameter is `unknown_environment`: the node is older than its round, or the operator mistyped.
"""

from dataclasses import fields
from typing import Any

from protocol.errors import UnknownEnvironment
from protocol.tasks.environment import Environment, Parameters
from protocol.tasks.holdem import Holdem
from protocol.tasks.limit_poker import Kuhn, Leduc
from protocol.tasks.sokoban import Sokoban

ENVIRONMENTS: dict[str, type[Any]] = {"holdem": Holdem, "kuhn": Kuhn, "leduc": Leduc, "sokoban": Sokoban}


def environment(name: str, parameters: Parameters) -> Environment:
    """The built-in environment of that name, or `unknown_environment`."""
    if name not in ENVIRONMENTS:
        raise UnknownEnvironment(
            f"This version knows no environment {name[:40]!r}.",
            hint=f"Built in: {', '.join(sorted(ENVIRONMENTS))}. Is this version older than the round's?",
        )
    kind = ENVIRONMENTS[name]
    expected: dict[str, Any] = {field.name: field.default for field in fields(kind)}
    for key, value in parameters.items():
        if key not in expected or type(value) is not type(expected[key]):
            said = ", ".join(f"{other} = {default!r}" for other, default in expected.items()) or "none"
            raise UnknownEnvironment(
                f"{name} takes no parameter {key[:40]} = {str(value)[:40]!r}.",
                hint=f"Parameters, as by default: {said}.",
            )
    try:
        found: Environment = kind(**dict(parameters))
    except ValueError as error:
        raise UnknownEnvironment(f"{name}: {error}.", hint="docs/tasks.md has the bounds.") from None
    return found


def described(name: str) -> str:
    """What a built-in environment is, and its parameters as by default."""
    kind = ENVIRONMENTS[name]
    about = (kind.__doc__ or "").strip().partition("\n")[0].rstrip(".")
    taken = ", ".join(f"{field.name} = {field.default!r}" for field in fields(kind))
    return f"a game of several turns: {about}" + (f" ({taken})" if taken else "")


def names() -> tuple[str, ...]:
    """All built-in environments."""
    return tuple(sorted(ENVIRONMENTS))
