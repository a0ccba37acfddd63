"""The rounds that an owner types: join strings, or hosts whose round the owner confirms."""

import sys
from pathlib import Path

import typer

from protocol.errors import ConfigInvalid
from swarm_node.commands.options import ConfirmOptions


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
