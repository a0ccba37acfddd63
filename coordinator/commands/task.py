"""The commands of `swarm-coordinator` about tasks: which there are, and what is wrong with one."""

import asyncio
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from coordinator.commands.options import EXIT_CODES, AsJson, Settings
from coordinator.config import load
from coordinator.tasks.kinds import SHIPPED
from protocol.tasks import BUILT_IN, environments
from protocol.text.lesson import lesson

app = typer.Typer(help="List tasks, and check one.", no_args_is_help=True)


@app.command(
    "list",
    epilog=lesson(
        "swarm-coordinator task list",
        "`swarm-coordinator init round.toml --set task.name=…` with one of these names.",
        EXIT_CODES,
    ),
)
def list_tasks(as_json: AsJson = False) -> None:
    """List the built-in values of `task.name`; a file such as my_task.py is also allowed."""
    found = every()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for name, about in found.items():
        typer.echo(f"{name:16} {about}")


@app.command(
    epilog=lesson(
        "swarm-coordinator task check my_task.py",
        "mend what is an error, then `launch`.",
        "Exit codes: 0 nothing is wrong, 1 something is, 2 a setting is wrong.",
    )
)
def check(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="A round's TOML file, or a my_task.py.")],
    settings: Settings,
    as_json: AsJson = False,
) -> None:
    """Check a task before a round: its problems, lengths of prompts, and rewards.

    Rewards are tried as the round would run them, in processes that are killed, on real problems: with their answers,
    with others' answers, with empty and with random answers. Each finding has its place and the next step.
    """
    from coordinator.tasks.task_check import check as look

    plain = source.suffix == ".py"
    config = load(None if plain else source, [f"task.name={source}", *settings] if plain else settings)
    with tempfile.TemporaryDirectory(prefix="task-check-") as folder:
        found = asyncio.run(look(config, Path(folder)))
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in found], indent=2))
    else:
        for each in found:
            typer.echo(f"{each.severity}: {each.code}: {each.place}\n  {each.message}\n  {each.next_step}")
        typer.echo(f"{len(found)} findings" if found else "No problems found.")
    raise typer.Exit(int(any(each.severity == "error" for each in found)))


def every() -> dict[str, str]:
    """What each task is, by its name."""
    found = {name: (made.__doc__ or "").partition(";")[0] for name, made in BUILT_IN.items()}
    found |= {name: environments.described(name) for name in environments.names()}
    return found | {name: about for name, (about, _) in SHIPPED.items()}
