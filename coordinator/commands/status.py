"""`swarm-coordinator status`: one screen; its first line says whether and why the learner waits, and what to change."""

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.commands import asking
from coordinator.commands.options import AsJson, ConfigFile, Settings
from coordinator.config import Config, fixed, load
from protocol.errors import NotAuthorised, NotFound, Unreachable
from protocol.policy.phrase import phrase

if TYPE_CHECKING:
    from rich.console import Console

WATCH_EVERY_S = 2.0
"""Time between two refreshes; the figures themselves are computed less often."""

HELP_LINE = "Ctrl-C closes this view; the round continues."


def status(
    config_file: ConfigFile,
    settings: Settings,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every 2 seconds, until Ctrl-C.")] = False,
) -> None:
    """Show the state of the round: first whether the learner waits and why, then details.

    The command queries the running coordinator. If it is stopped, the command reads the database instead, and shows
    since when the round is stopped and how to continue it.
    """
    from rich.console import Console

    from coordinator.reports import screen

    config = load(config_file, settings)
    console, launch = Console(), asking.launch_command(config_file, settings)
    if not watch:
        state = read_status(config, launch)
        if as_json:
            typer.echo(json.dumps(state, indent=2))
        else:
            screen.show(console, state)
            typer.echo(f"Phrase:      {phrase(state['round_id'])}")
            join = state["join_string"]
            typer.echo(f"Join with:   swarm-node join {join}")  # whole, to be copied: no panel breaks it
        return
    try:
        if screen.can_draw(console) and not as_json:
            _draw_on(console, config, launch)
        else:
            _print_on(config, launch, as_json)
    except KeyboardInterrupt:
        raise typer.Exit from None


def read_status(config: Config, launch: str) -> dict[str, Any]:
    """Return the status from the coordinator, or from the store of a stopped round, with the join string."""
    state = _read(config, launch)
    return state | {"join_string": asking.launched(config).round.join_string(state["round_id"])}


def _read(config: Config, launch: str) -> dict[str, Any]:
    answer: dict[str, Any] | None = None
    if asking.has_token(config):
        with suppress(NotFound, NotAuthorised):  # an older coordinator, or one with another token
            answer = asking.ask(config, "GET", "/v1/operator/status")
    if answer is None:
        answer = asking.ask(config, "GET", "/v1/status", as_operator=False)
        if answer is not None and not asking.is_ours(config, answer["round_id"]):
            answer = None
    if answer is not None:
        return answer | {"stopped_since_ms": None, "stopped": ""}
    fixed.require_round(config.round.directory)
    from coordinator.reports import summary

    since_ms, settings = asking.stopped_since_ms(config), asking.launched(config)
    stored = asking.run_in_store(config, lambda store: summary.stopped(store, config=settings, since_ms=since_ms))
    return stored | {"stopped": asking.stopped_line(config, launch, since_ms)}


def _looks(config: Config, launch: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the status repeatedly, with a note if it is old: a restarting coordinator is waited for."""
    state, note = read_status(config, launch), ""
    while True:
        yield state, note
        time.sleep(WATCH_EVERY_S)
        try:
            state, note = read_status(config, launch), ""
        except Unreachable as error:
            note = f"{error} Retrying; the figures above are out of date. "


def _print_on(config: Config, launch: str, as_json: bool) -> None:
    from coordinator.reports import overview

    for state, note in _looks(config, launch):
        if note:
            typer.echo(note, err=True)
        else:
            typer.echo(json.dumps(state) if as_json else f"{overview.text(state)}\n")


def _draw_on(console: "Console", config: Config, launch: str) -> None:
    from rich.live import Live

    from coordinator.reports import screen

    with Live(console=console, auto_refresh=False, screen=False) as live:
        for state, note in _looks(config, launch):
            live.update(screen.panel(state, note=f"{note}{HELP_LINE}"), refresh=True)
