"""The live view of `join`: a panel below the log lines, redrawn every second, only on a terminal.

- Without a terminal, and with `--plain`, `--quiet` or `--json`, there is no panel, only log lines.
- It only reads snapshots. Log lines go through the same console, so that the panel stays below them.
"""

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import trio
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.logging import RichHandler
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from protocol.text.log_lines import Lines
from protocol.text.plain import one_line
from swarm_node.base.logs import DRAWN
from swarm_node.owner import status_lines
from swarm_node.owner.snapshot import AgentSnapshot

DRAW_EVERY_S = 1.0


def panel(snapshot: dict[str, Any]) -> RenderableType:
    """Return a snapshot as a panel."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1)
    calm = status_lines.is_working(snapshot)
    several = status_lines.numbered_rounds(snapshot)
    for label, line in several:
        table.add_row(label, Text(one_line(line)))
    if several:
        table.add_row("shown", Text(one_line(status_lines.shown_round(snapshot))))
    table.add_row("doing", Text(one_line(status_lines.doing(snapshot)), style="green" if calm else "yellow"))
    if snapshot["download"]:
        load = snapshot["download"]
        table.add_row("", ProgressBar(total=max(1, load["bytes"]), completed=load["bytes_done"], width=40))
    rows = ("version", "speed", "credit", "rate", "payouts", "verdicts", "traffic", "reach", "machine")
    for name in rows:
        table.add_row(name, Text(one_line(getattr(status_lines, name)(snapshot))))
    for label, line in status_lines.cards(snapshot):
        table.add_row(label, Text(one_line(line)))
    table.add_row("queue", Text(status_lines.queue(snapshot)))
    title = f"{snapshot['name']} at {snapshot['coordinator']}"
    help_line = Text(
        "Ctrl-C leaves · swarm-node open | pause | finish | status | limits in another terminal", style="dim"
    )
    return Panel(Group(table, help_line), title=Text(title), title_align="left", border_style="dim")


def can_show(console: Console) -> bool:
    """Return True if the output is a terminal that supports drawing."""
    return console.is_terminal and not console.is_dumb_terminal


def make(console: Console) -> Callable[[Callable[[], AgentSnapshot]], Awaitable[None]]:
    """Return a task that draws until cancelled, or until the terminal closes; from now on log lines appear above it."""
    handler = RichHandler(console=console, show_path=False, markup=False, highlighter=None, log_time_format="%H:%M:%S")
    root = logging.getLogger()
    root.handlers[:] = [handler]
    handler.addFilter(lambda record: not hasattr(record, DRAWN))
    handler.setFormatter(Lines("%(message)s"))

    async def show(look: Callable[[], AgentSnapshot]) -> None:
        # A terminal that was closed is no reason to stop before the leases are returned.
        with suppress(OSError), Live(console=console, auto_refresh=False, transient=True) as live:
            while True:
                live.update(panel(look().to_json()), refresh=True)
                await trio.sleep(DRAW_EVERY_S)

    return show
