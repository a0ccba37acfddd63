"""`swarm-coordinator eval`: let the nodes evaluate a version, import what other suites measured, and show all results.

- `run` only records the evaluation; a running coordinator leases it with its next answers. `import` records a run of a
  suite, `remove` deletes it. The others only read.
"""

import json
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from coordinator.commands.asking import opened_store, run_in_store
from coordinator.commands.options import AsJson, ConfigFile, Settings
from coordinator.config import load
from protocol.errors import ConfigInvalid, NotFound, Unreachable
from protocol.text.commands import lesson
from protocol.text.plain import counted

if TYPE_CHECKING:
    from coordinator.config import Config
    from coordinator.store.state import Database
    from coordinator.transactions.suite_runs import ImportedRun

app = typer.Typer(help="Measure versions on held-out problems.", no_args_is_help=True, add_completion=False)

EXIT_CODES = "Exit codes: 0 done, 1 failed, 2 a setting is wrong, 3 the evaluation ended without all its problems."

LOOK_S = 1.0
"""Time between two reads of the store, in which another process writes the result."""

ENDS_WITHIN_S = 30.0
"""Time after its patience within which a running coordinator ends an evaluation."""

RESULTS_FILES = ("results_*.json", "*.eval")
"""Names of results files, which are sought in a folder: of lm-eval and lighteval, and of inspect-ai."""

NO_EVALUATIONS = "There are no evaluations yet: set eval.every, or run `swarm-coordinator eval run`."
NO_SUITES = "Nothing was imported yet: run `swarm-coordinator eval import`."

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

    config = load(config_file, settings)
    size = _size(config, split)
    chosen = {"problems": problems or config.eval.problems, "samples": samples or config.eval.samples}
    evaluation_settings = config.eval.model_copy(update=chosen)
    with closing(opened_store(config)) as database:
        newest, _ = database.run_now(policy_versions.newest_version)
        number = database.run_now(
            evaluations.start_evaluation,
            version or newest,
            split,
            size,
            evaluation_settings,
            seed=config.round.seed,
            now_ms=now_ms(),
        )
        evaluation = _await(database, number, config.eval.patience_s) if wait else _evaluation(database, number)
    typer.echo(json.dumps(evaluation, indent=2) if as_json else overview.evaluation(evaluation))
    if wait and evaluation["state"] != "done":
        raise typer.Exit(3)


@app.command(
    "list",
    epilog=lesson(
        "swarm-coordinator eval list round.toml", "`eval show` for the last one, or for a version.", EXIT_CODES
    ),
)
def list_(
    config_file: ConfigFile,
    settings: Settings,
    version: Version = 0,
    suites: Annotated[bool, typer.Option("--suites", help="List what was imported from other suites.")] = False,
    as_json: AsJson = False,
) -> None:
    """List evaluations, the oldest first."""
    from coordinator.reports import overview
    from coordinator.transactions import evaluations, suite_runs

    with closing(opened_store(load(config_file, settings))) as database:
        imported = database.run_now(suite_runs.list_runs, version=version)
        rows = imported if suites else database.run_now(evaluations.list_evaluations, version=version)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        for line in overview.suite_run(row) if suites else [overview.evaluation(row)]:
            typer.echo(line)
    if not rows:
        typer.echo(NO_SUITES if suites else NO_EVALUATIONS)
    if imported and not suites:
        typer.echo(f"{counted(len(imported), 'run')} of other suites: `eval list --suites`.")


@app.command(
    "import",
    epilog=lesson(
        "swarm-coordinator eval import round.toml results/",
        "the training page shows the results beside those of the nodes.",
        "Exit codes: 0 imported, now or before; 1 failed, 2 a setting is wrong.",
    ),
)
def import_(
    config_file: ConfigFile,
    results: Annotated[Path, typer.Argument(help="A results file of lm-eval, inspect-ai or lighteval, or a folder.")],
    settings: Settings,
    version: Annotated[int, typer.Option(min=0, help="The version, if the file names the model `swarm`.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Import what another suite measured of a version through the endpoint."""
    from coordinator.base.clock import now_ms
    from coordinator.endpoint.suite_files import ResultsRefused, read_results, version_of
    from coordinator.reports import overview
    from coordinator.transactions import suite_runs

    made = []
    with closing(opened_store(load(config_file, settings))) as database:
        for path in _results_files(results):
            try:
                with path.open("rb") as file:
                    run = read_results(file)
                outcome = database.run_now(suite_runs.record, run, version_of(run, version), now_ms=now_ms())
            except (ResultsRefused, NotFound) as error:
                raise type(error)(f"{path}: {error.message}", hint=error.hint) from None
            row = database.run_now(suite_runs.one_run, outcome.number)
            made.append({"file": str(path), "is_new": outcome.is_new, **row})
            if not as_json:
                _tell_import(path, outcome, overview.suite_run(row))
    if as_json:
        typer.echo(json.dumps(made, indent=2))


@app.command(
    epilog=lesson(
        "swarm-coordinator eval remove round.toml 3",
        "`eval list --suites` shows the others; the file can be imported again.",
        "Exit codes: 0 removed, 1 failed, 2 a setting is wrong.",
    )
)
def remove(
    config_file: ConfigFile,
    number: Annotated[int, typer.Argument(min=1, help="The number that `import` printed.")],
    settings: Settings,
) -> None:
    """Remove an imported run from the pages."""
    from coordinator.transactions import suite_runs

    run_in_store(load(config_file, settings), suite_runs.remove, number)
    typer.echo(f"Run {number} is removed.")


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


def _results_files(place: Path) -> list[Path]:
    """Return the results files at a place: the file itself, or every one in a folder and the folders below it."""
    if not place.exists():
        raise ConfigInvalid(f"{place} does not exist.", hint="Name the results file, or the folder that it is in.")
    if not place.is_dir():
        return [place]
    found = sorted(path for pattern in RESULTS_FILES for path in place.rglob(pattern) if path.is_file())
    if not found:
        raise NotFound(f"{place} has no results file.", hint=f"Their names are {' and '.join(RESULTS_FILES)}.")
    return found


def _tell_import(path: Path, outcome: "ImportedRun", lines: Sequence[str]) -> None:
    for line in lines:
        typer.echo(line)
    if outcome.is_new:
        typer.echo(f"{path}: imported as run {outcome.number}, of version {outcome.version}.")
    else:
        typer.echo(f"{path}: imported before as run {outcome.number}, of version {outcome.version}; nothing changed.")


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
    while (evaluation := _evaluation(database, number))["state"] == "running":
        if time.monotonic() > deadline:
            raise Unreachable(
                f"Evaluation {number} did not end within {patience_s:g} s.",
                hint="Check that the round is running; the evaluation continues when it is launched.",
            )
        time.sleep(LOOK_S)  # the store sends no notifications
    return evaluation


def _evaluation(database: "Database", number: int) -> dict[str, Any]:
    from coordinator.transactions import evaluations

    return next(row for row in database.run_now(evaluations.list_evaluations) if row["number"] == number)


def _marks(scores: list[float]) -> str:
    return " ".join(f"{score:g}" for score in scores)
