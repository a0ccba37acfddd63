"""A round's overview on a terminal: once, again and again (`status --watch`), or below the log of `launch`.

- Without a terminal nothing is drawn: the same lines are printed, or the log stays as it is.
- The data is the JSON of `/v1/operator/status`, or of `/v1/status` if the operator's token is missing.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.logging import RichHandler
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from coordinator.config.round import host_of_url
from coordinator.reports import overview
from protocol.people.addresses import leads_to_this_machine
from protocol.text.log_lines import Lines

log = logging.getLogger(__name__)

Look = Callable[[], Awaitable[Mapping[str, Any]]]
Show = Callable[[Look], Awaitable[None]]

DRAW_EVERY_S = 1.0

LAUNCHED = "Ctrl-C stops the round; launching again goes on · swarm-coordinator status | nodes in another terminal"

STYLES: dict[overview.Tone, str] = {"good": "green", "bad": "bold yellow", "plain": ""}


def can_draw(console: Console) -> bool:
    """Return True if `console` is a terminal that can be drawn on."""
    return console.is_terminal and not console.is_dumb_terminal


def panel(told: Mapping[str, Any], *, note: str = "") -> RenderableType:
    """Return the overview as a panel, with `note` below it."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1)
    for part in overview.parts(told):
        table.add_row(part.title, Text("\n".join(part.lines), style=STYLES[part.tone]))
    inside = Group(table, Text(note, style="dim")) if note else table
    title = Text(f"round {told['round_id'][:12]}")
    return Panel(inside, title=title, title_align="left", border_style="dim")


def for_launch() -> Show | None:
    """Return the task that draws the round below its log; None if there is no terminal."""
    console = Console(stderr=True)
    return below_log(console) if can_draw(console) else None


def code_drawer(draw: Callable[[str], str | None], console: Console | None = None) -> Callable[[str], str | None]:
    """Return a function that draws a join string for a phone's camera, if standard output is a terminal that shows it.

    None is drawn of an address of this machine, which leads a phone nowhere, and where the lines would not fit.
    """
    screen = console or Console()

    def code_of(join_string: str) -> str | None:
        if not can_draw(screen) or screen.color_system not in ("256", "truecolor") or "utf" not in screen.encoding:
            return None
        if leads_to_this_machine(host_of_url(join_string)) or not (code := draw(join_string)):
            return None
        lines = code.count("\n") + 1  # a line holds two rows of the square
        return code if lines < screen.height and 2 * lines <= screen.width else None

    return code_of


def below_log(console: Console, *, every_s: float = DRAW_EVERY_S) -> Show:
    """Return a task that draws until it is cancelled; from now on, log lines go above the panel."""
    handler = RichHandler(console=console, show_path=False, markup=False, highlighter=None, log_time_format="%H:%M:%S")
    handler.setFormatter(Lines("%(message)s"))
    logging.getLogger().handlers[:] = [handler]

    async def draw(look: Look) -> None:
        import asyncio  # not for `status`, which only prints

        with Live(console=console, auto_refresh=False, transient=True) as live:
            while True:
                try:
                    live.update(panel(await look(), note=LAUNCHED), refresh=True)
                except Exception:  # a drawing error must not end the round
                    log.exception("could not draw the view")
                await asyncio.sleep(every_s)

    return draw


def show(console: Console, told: Mapping[str, Any]) -> None:
    """Draw the overview, or print its lines if there is no terminal."""
    if can_draw(console):
        console.print(panel(told))
    else:
        print(overview.text(told), flush=True)
