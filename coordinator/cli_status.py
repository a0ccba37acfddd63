"""`swarm-coordinator status`: one screen that says first whether the learner waits, why, and which setting to turn."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.config import Config, load
from protocol.errors import Unreachable

if TYPE_CHECKING:
    from rich.console import Console

ASK_S = 10.0
WATCH_EVERY_S = 2.0
HELP_LINE = "Ctrl-C ends this view; the round goes on."


def status(
    config_file: Annotated[Path, typer.Argument(help="The round's TOML file.")],
    settings: Annotated[
        list[str], typer.Option("--set", default_factory=list, help="section.key=value on top of the file; repeatable.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything, for scripts.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every two seconds, until Ctrl-C.")] = False,
) -> None:
    """Ask the running coordinator where its round stands: whether the learner waits and why, then all the rest."""
    from rich.console import Console

    from coordinator import screen

    config = load(config_file, settings)
    console = Console()
    if not watch:
        told = ask(config)
        if as_json:
            typer.echo(json.dumps(told, indent=2))
        else:
            screen.show(console, told)
        return
    try:
        if screen.can_draw(console) and not as_json:
            _draw_on(console, config)
        else:
            _print_on(config, as_json)
    except KeyboardInterrupt:
        raise typer.Exit from None


def ask(config: Config) -> dict[str, Any]:
    """What the running coordinator says of its round."""
    import httpx

    try:
        found: dict[str, Any] = httpx.get(f"http://{config.round.listen}/v1/status", timeout=ASK_S).json()
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        raise Unreachable(
            f"No coordinator answers at {config.round.listen} ({error}).", hint="Launch it first."
        ) from error
    return found


def _looks(config: Config) -> Iterator[tuple[dict[str, Any], str]]:
    """What is said, again and again, and why it may be old: a coordinator that restarts is waited for."""
    told, note = ask(config), ""
    while True:
        yield told, note
        time.sleep(WATCH_EVERY_S)
        try:
            told, note = ask(config), ""
        except Unreachable as error:
            note = f"{error} Asking again; what stands above is old. "


def _print_on(config: Config, as_json: bool) -> None:
    from coordinator import overview

    for told, note in _looks(config):
        if note:
            typer.echo(note, err=True)
        else:
            typer.echo(json.dumps(told) if as_json else f"{overview.text(told)}\n")


def _draw_on(console: "Console", config: Config) -> None:
    from rich.live import Live

    from coordinator import screen

    with Live(console=console, auto_refresh=False, screen=False) as live:
        for told, note in _looks(config):
            live.update(screen.panel(told, note=f"{note}{HELP_LINE}"), refresh=True)
