"""One command over all rounds that a home has joined: each under its address, as `earnings` and `why` show them."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import typer

from protocol.errors import ConfigInvalid, SwarmError, named

if TYPE_CHECKING:
    from swarm_node.coordinator_api.join_string import JoinString


def for_each_round(joins: "Sequence[JoinString]", show: "Callable[[JoinString], None]", *, headed: bool = True) -> None:
    """Call `show` for each round; with several, print its address before, and go on to the next after an error.

    With `headed` False only errors name their round. An error of a single round is raised, one of several ends the
    command with exit code 1.
    """
    if len(joins) == 1:
        show(joins[0])
        return
    code = 0
    for join in joins:
        if headed:
            typer.echo(f"{join.url}:")
        try:
            show(join)
        except SwarmError as error:
            typer.echo(f"{join.url}: {named(error)}", err=True)
            code = 1
    if code:
        raise typer.Exit(code)


def the_only(joins: "Sequence[JoinString]", what: str) -> "JoinString":
    """Return the round of a command that works on one; raise `ConfigInvalid` if `joins` has several."""
    if len(joins) > 1:
        urls = ", ".join(join.url for join in joins)
        raise ConfigInvalid(
            f"This node has joined {len(joins)} rounds ({urls}), and {what} needs one.",
            hint="Put the join string of one round before the other arguments.",
        )
    return joins[0]
