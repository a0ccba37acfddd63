"""`swarm-coordinator eval`: let the nodes evaluate a version, and show the results.

- `run` only records the evaluation; a running coordinator leases it with its next answers. The others only read.
"""

import json
import time
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from coordinator.commands.asking import opened_store
from coordinator.commands.options import AsJson, ConfigFile, Settings
from coordinator.config import load
from protocol.errors import ConfigInvalid, NotFound, Unreachable
from protocol.text.lesson import lesson

if TYPE_CHECKING:
    from coordinator.config import Config
    from coordinator.store.state import Database

app = typer.Typer(help="Measure versions on held-out problems.", no_args_is_help=True, add_completion=False)

EXIT_CODES = "Exit codes: 0 done, 1 failed, 2 a setting is wrong, 3 the evaluation ended without all its problems."

LOOK_S = 1.0
"""Time between two reads of the store, in which another process writes the result."""

ENDS_WITHIN_S = 30.0
"""Time after its patience within which a running coordinator ends an evaluation."""

EVALUATED: tuple[Literal["held_out", "validation"], ...] = ("held_out", "validation")

Version = Annotated[int, typer.Option(min=0, help="A version; 0: every version.")]


@app.command(
    epilog=lesson(
        "swarm-coordinator eval run round.toml --problems 64",
        "`eval show` lists the results by problem; `export --best` writes the best version.",
        EXIT_CODES,
    )
)
def run(
    config_file: ConfigFile,
    settings: Settings,
    version: Annotated[int, typer.Option(min=0, help="Number of the newest version; 0: the newest one.")] = 0,
    split: Annotated[str, typer.Option(help="held_out or validation.")] = "held_out",
    problems: Annotated[int, typer.Option(min=0, help="Number of problems; 0: eval.problems.")] = 0,
    samples: Annotated[int, typer.Option(min=0, max=256, help="Samples per problem; 0: eval.samples.")] = 0,
    wait: Annotated[bool, typer.Option(help="Wait for the result.")] = True,
    as_json: AsJson = False,
) -> None:
    """Evaluate the newest version on the nodes of a running round."""
    from coordinator.base.clock import now_ms
    from coordinator.reports import overview
    from coordinator.transactions import evaluations, policy_versions
    from coordinator.transactions.evaluations import EvaluationTerms

    config = load(config_file, settings)
    size = _size(config, split)
    terms = EvaluationTerms.from_config(config)
    terms = replace(terms, problems=problems or terms.problems, samples=samples or terms.samples)
    with closing(opened_store(config)) as database:
        newest, _ = database.run_now(policy_versions.newest_version)
        number = database.run_now(evaluations.start_evaluation, version or newest, split, size, terms, now_ms=now_ms())
        evaluation = _await(database, number, config.eval.patience_s) if wait else _one(database, number)
    typer.echo(json.dumps(evaluation, indent=2) if as_json else overview.evaluation(evaluation))
    if wait and evaluation["state"] != "done":
        raise typer.Exit(3)


@app.command(
    "list",
    epilog=lesson(
        "swarm-coordinator eval list round.toml", "`eval show` for the last one, or for a version.", EXIT_CODES
    ),
)
def list_(config_file: ConfigFile, settings: Settings, version: Version = 0, as_json: AsJson = False) -> None:
    """List evaluations, the oldest first."""
    from coordinator.reports import overview
    from coordinator.transactions import evaluations

    with closing(opened_store(load(config_file, settings))) as database:
        rows = database.run_now(evaluations.list_evaluations, version=version)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        typer.echo(overview.evaluation(row))
    if not rows:
        typer.echo("There are no evaluations yet: set eval.every, or run `swarm-coordinator eval run`.")


@app.command(
    epilog=lesson(
        "swarm-coordinator eval show round.toml --version 7",
        "`policy rollback`, if an older version is better.",
        EXIT_CODES,
    )
)
def show(config_file: ConfigFile, settings: Settings, version: Version = 0, as_json: AsJson = False) -> None:
    """Show the last evaluation, or the last of a version, problem by problem."""
    from coordinator.reports import overview
    from coordinator.transactions import evaluations

    with closing(opened_store(load(config_file, settings))) as database:
        rows = database.run_now(evaluations.list_evaluations, version=version)
        if not rows:
            raise NotFound("There is no such evaluation.", hint="See `swarm-coordinator eval list`.")
        evaluation = rows[-1]
        problems = database.run_now(evaluations.details, evaluation["number"])
    if as_json:
        typer.echo(json.dumps(evaluation | {"by_problem": problems}, indent=2))
        return
    typer.echo(overview.evaluation(evaluation))
    for problem in problems:
        scores = problem["scores"]
        typer.echo(f"  problem {problem['problem']:6d}  {sum(scores) / len(scores):7.3f}  {_marks(scores)}")


def _size(config: "Config", split: str) -> int:
    from coordinator.tasks.task import open_task

    problems = open_task(config)
    sizes = {name: len(problems.problems(name)) for name in EVALUATED}
    if split not in sizes:
        raise ConfigInvalid(f"{split} is not a split for evaluations.", hint="Use held_out or validation.")
    size = sizes[split]
    if not size:
        raise ConfigInvalid(f"The task has no {split} problems.")
    return size


def _await(
    database: "Database", number: int, patience_s: float, *, ends_within_s: float = ENDS_WITHIN_S
) -> dict[str, Any]:
    """Wait until the evaluation has ended, and return it; a running coordinator ends it."""
    deadline = time.monotonic() + patience_s + ends_within_s
    while (evaluation := _one(database, number))["state"] == "running":
        if time.monotonic() > deadline:
            raise Unreachable(
                f"Evaluation {number} did not end within {patience_s:g} s.",
                hint="Check that the round is running; the evaluation continues when it is launched.",
            )
        time.sleep(LOOK_S)  # the store sends no notifications
    return evaluation


def _one(database: "Database", number: int) -> dict[str, Any]:
    from coordinator.transactions import evaluations

    return next(row for row in database.run_now(evaluations.list_evaluations) if row["number"] == number)


def _marks(scores: list[float]) -> str:
    return " ".join(f"{score:g}" for score in scores)
