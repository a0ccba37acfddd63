"""`swarm-coordinator task`: list the built-in tasks, check a task for errors, and add to a judge's budget."""

import asyncio
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from coordinator.commands.options import EXIT_CODES, AsJson, Settings
from coordinator.config import load
from coordinator.learner import start
from coordinator.tasks.judge_store import JudgeBudget, JudgeStore
from coordinator.tasks.kinds import ENVIRONMENTS, SHIPPED
from protocol.errors import ConfigInvalid
from protocol.tasks import BUILT_IN
from protocol.text.commands import lesson
from protocol.text.plain import counted

app = typer.Typer(help="List tasks, check one, and add to a judge's budget.", no_args_is_help=True)


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
    tasks = every()
    if as_json:
        typer.echo(json.dumps(tasks, indent=2))
        return
    for name, about in tasks.items():
        typer.echo(f"{name:16} {about}")


@app.command(
    epilog=lesson(
        "swarm-coordinator task check my_task.py",
        "fix the errors, then `launch`.",
        "Exit codes: 0 no errors, 1 errors were found, 2 a setting is wrong.",
    )
)
def check(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="A round's TOML file, or a my_task.py.")],
    settings: Settings,
    as_json: AsJson = False,
) -> None:
    """Check a task before a round: its problems, lengths of prompts, and rewards.

    Rewards are computed as in a round, in separate processes, on real problems: with the right answers, with answers of
    other problems, with empty and with random answers. An environment is played three times by a scripted policy, and
    the transcripts are printed. Each finding has its place and the next step.
    """
    from coordinator.tasks.task_check import check as look

    plain = source.suffix == ".py"
    config = load(None if plain else source, [f"task.name={source}", *settings] if plain else settings)
    read_file = None
    try:
        read_file = start.text_reader(config)
    except ConfigInvalid as error:
        typer.echo(f"warning: The lengths of the prompts are not checked: {error.message}", err=True)
    else:
        start.require_text(config.model, read_file)
    with tempfile.TemporaryDirectory(prefix="task-check-") as folder:
        findings = asyncio.run(look(config, Path(folder), read_file, (lambda _: None) if as_json else typer.echo))
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in findings], indent=2))
    else:
        for each in findings:
            typer.echo(f"{each.severity}: {each.code}: {each.place}\n  {each.message}\n  {each.next_step}")
        typer.echo(counted(len(findings), "finding") if findings else "Nothing to correct.")
    raise typer.Exit(int(any(each.severity == "error" for each in findings)))


@app.command(
    epilog=lesson(
        "swarm-coordinator task budget runs/judge --calls 5000",
        "`status` shows within seconds that groups are judged again.",
        EXIT_CODES,
    )
)
def budget(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", envvar="SWARM_JUDGE_FOLDER", help="The folder of the round's judge.")
    ],
    calls: Annotated[int, typer.Option(min=0, help="Number of calls to add.")] = 0,
    tokens: Annotated[int, typer.Option(min=0, help="Number of tokens to add.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Show what the reward `judge` has spent, and add to its budget.

    With nothing left of SWARM_JUDGE_CALLS_MAX or SWARM_JUDGE_TOKENS_MAX, a round pauses: groups wait, and none is lost.
    What is added here counts beside these settings, also after the next launch.
    """
    store = JudgeStore.existing(folder)
    if calls or tokens:
        store.add(JudgeBudget(calls, tokens))
    spent, added = store.spent(), store.added()
    if as_json:
        typer.echo(json.dumps({"spent": spent._asdict(), "added": added._asdict()}))
        return
    typer.echo(f"spent                {spent.calls:,} calls, {spent.tokens:,} tokens")
    typer.echo(f"added to the limits  {added.calls:,} calls, {added.tokens:,} tokens")


def every() -> dict[str, str]:
    """Return the description of each task, by name."""
    tasks = {name: (made.__doc__ or "").partition(";")[0] for name, made in BUILT_IN.items()}
    tasks |= {name: kind.about for name, kind in ENVIRONMENTS.items()}
    return tasks | {name: about for name, (about, _) in SHIPPED.items()}
