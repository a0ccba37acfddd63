"""The rounds that a command is for: those that the owner types, or all that the home has joined.

- A typed round is a join string, or a host whose round the owner confirms.
- A command over all rounds shows each under its address, as `earnings` and `why` do.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from protocol.errors import ConfigInvalid, SwarmError, named
from swarm_node.commands.options import ConfirmOptions

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


def check_form(target: str) -> None:
    """Refuse a target that is neither a host nor a join string."""
    from swarm_node.coordinator_api import join_string, short_join

    if short_join.is_short(target):
        short_join.urls_of(target)
    else:
        join_string.parse(target)


def rounds_of(targets: list[str], home: Path, confirm: ConfirmOptions) -> list[str]:
    """Return the join strings of the rounds to take part in; without a target, of those that were joined last."""
    from swarm_node.coordinator_api import last_round

    if not targets:
        return [str(join) for join in last_round.all_chosen("", home)]
    if len(targets) > 1 and confirm != ConfirmOptions():
        raise ConfigInvalid(
            "--phrase and --fingerprint confirm one round.", hint="Give the join strings of the other rounds."
        )
    return [round_of(target, home, confirm) for target in targets]


def round_of(target: str, home: Path, confirm: ConfirmOptions) -> str:
    """Return the join string of a host, once the owner has confirmed it; other targets stay as they are."""
    import trio

    from swarm_node.coordinator_api import last_round, short_join

    if not short_join.is_short(target):
        if confirm != ConfirmOptions():
            raise ConfigInvalid(
                "--phrase and --fingerprint confirm the round of a host.",
                hint="A join string contains the fingerprint: leave these options out.",
            )
        return target
    if confirm == ConfirmOptions() and (known := last_round.find_by_url(home, short_join.urls_of(target))):
        return str(known)
    ask = _ask_owner if sys.stdin.isatty() and sys.stderr.isatty() else None
    proof = short_join.Proof(confirm.phrase, confirm.fingerprint, ask)
    return str(trio.run(short_join.find_round, target, proof))


def _ask_owner(url: str, phrase: str) -> bool:
    """Show the phrase of a round, and return True if the owner confirms it."""
    typer.echo(f"{url} serves the round with this phrase:\n\n    {phrase}\n", err=True)
    typer.echo("Compare it with the phrase that the operator gave you another way than by this address.", err=True)
    return typer.confirm("Are all six words the same?", default=False, err=True)
