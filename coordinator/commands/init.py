"""`swarm-coordinator init`: a round's file, if there is none yet, then its keys, store, deposit and join string.

- The last line on stdout is the join string, for scripts; questions and next steps go to stderr.
- A file that exists is read and never written: the questions are for one that does not.
"""

import sys
import tomllib
from pathlib import Path
from typing import Annotated

import typer

from coordinator.commands import options
from coordinator.commands.options import Settings
from coordinator.config import Config, load, manual, parse
from coordinator.config.reading import with_settings
from protocol.errors import ConfigInvalid


def init(
    config_file: Annotated[
        Path, typer.Argument(metavar="ROUND.toml", help="The round's TOML file; it is made if there is none.")
    ],
    settings: Settings,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Ask nothing: a new file has what --set says, else the defaults.")
    ] = False,
) -> None:
    """Make a round's keys, store and deposit, and print the join string for its nodes.

    If the file does not exist, a few questions are asked first, and it is written with every setting explained.
    Take keys/root.pem of the round's folder offline afterwards: it is needed only to change the other keys.
    """
    from coordinator.service.round import Round, join_string

    new = not config_file.exists()
    if new:
        chosen = settings if yes else _asked(config_file, settings)
        options.require(parse(with_settings({}, chosen)))
        _write(config_file, chosen)
    config = load(config_file, settings)
    round_ = Round(config)
    round_.close()
    if new:
        _say_next(config_file, config)
    typer.echo(join_string(config, round_.round_id))


def _asked(config_file: Path, settings: list[str]) -> list[str]:
    """The settings with the operator's answers."""
    from coordinator.commands import guide

    if not sys.stdin.isatty():
        raise ConfigInvalid(
            f"There is no file {config_file}, and nobody to ask for its settings.",
            hint="Give --yes, with --set for what shall not be the default.",
        )
    options.require(parse(with_settings({}, settings)))  # before the first question
    typer.echo(f"{config_file} does not exist: a few questions, Enter takes what stands in brackets.", err=True)
    return guide.ask(
        settings,
        lambda text, default: str(typer.prompt(text, default=default, show_default=bool(default), err=True)),
        lambda text: typer.echo(f"  {text}", err=True),
    )


def _write(path: Path, settings: list[str]) -> None:
    """Write the file whole or not at all; it must read as what was chosen."""
    from coordinator.base.files import write_durably

    chosen = with_settings({}, settings)
    wanted = parse(chosen)
    text = manual.toml(chosen)
    if parse(tomllib.loads(text)) != wanted:
        raise RuntimeError("the file that would be written says something else than was chosen")
    try:
        write_durably(path, text.encode(), public=True)
    except OSError as error:
        raise ConfigInvalid(f"Cannot write {path}: {error.strerror}.") from error
    typer.echo(f"Wrote {path}: every setting with its default and its meaning. Change it as you like.", err=True)


def _say_next(config_file: Path, config: Config) -> None:
    keys = config.round.directory / "keys"
    for line in manual.warnings(config):
        typer.echo(f"warning: {line}", err=True)
    for line in (
        "Next:",
        f"  1. Move {keys / 'root.pem'} to offline storage: it is needed only to change the other keys.",
        f"  2. swarm-coordinator plan {config_file} --help: how many nodes it needs, and what that costs.",
        f"  3. swarm-coordinator launch {config_file}",
        "  4. Hand out the join string, which follows: `swarm-node join` with it takes part.",
    ):
        typer.echo(line, err=True)
