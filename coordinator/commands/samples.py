"""`swarm-coordinator samples`: show the samples of the nodes in the terminal.

- The commands only read the store; the round may be running or stopped.
- The text is untrusted; it is escaped before it is printed (`coordinator.base.terminal`).
"""

import json
import re
import shutil
import sys
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import inf
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.base import terminal
from coordinator.commands.options import EXIT_CODES, AsJson, ConfigFile, Settings
from coordinator.config import Config, fixed, load
from coordinator.pages.words import readable
from protocol.errors import ConfigInvalid
from protocol.limits import NAME_MAX_CHARS
from protocol.text.commands import lesson, with_option_groups
from protocol.text.plain import visible

if TYPE_CHECKING:
    from coordinator.commands.sample_records import Shown

app = typer.Typer(help="Read the samples of the nodes.", no_args_is_help=True, add_completion=False)


@dataclass(frozen=True)
class SampleOptions:
    """The options that choose samples."""

    limit: Annotated[int, typer.Option(min=1, help="Maximum number of samples to show.")] = 10
    version: Annotated[int, typer.Option(min=0, help="Only samples of this version; 0: all versions.")] = 0
    node: Annotated[
        str, typer.Option(help="Only samples of this node: its id, 6 or more characters from either end, or its name.")
    ] = ""
    reward_min: Annotated[float, typer.Option(help="Minimum reward.")] = -inf
    reward_max: Annotated[float, typer.Option(help="Maximum reward.")] = inf


@app.command(
    epilog=lesson(
        "swarm-coordinator samples show round.toml --reward-max 0 --limit 3",
        "`samples grep` finds a text; `task check` explains unexpected rewards.",
        EXIT_CODES,
    )
)
@with_option_groups
def show(config_file: ConfigFile, settings: Settings, chosen: SampleOptions, as_json: AsJson = False) -> None:
    """Show samples, newest group first.

    A sample is `unscored` until its group was judged, seconds after its arrival while the round runs. Answers to
    callers of the endpoint, and to a trainer of your own, are never judged.

    The store is only read. Nodes wrote the texts: control characters are printed as numbers (`\\x1b`), and every
    line of a text begins with `  | `.
    """
    print_samples(_find(load(config_file, settings), chosen), as_json)


@app.command(
    epilog=lesson(
        "swarm-coordinator samples grep round.toml '[0-9]{4}' --version 7",
        "`audit replay` with the claim checks that the node sampled it honestly.",
        EXIT_CODES,
    )
)
@with_option_groups
def grep(
    config_file: ConfigFile,
    pattern: Annotated[str, typer.Argument(metavar="PATTERN", help="A regular expression in Python's syntax.")],
    settings: Settings,
    *,
    ignore_case: Annotated[bool, typer.Option("--ignore-case", "-i", help="Ignore case.")] = False,
    chosen: SampleOptions,
    as_json: AsJson = False,
) -> None:
    """Show the samples whose prompt or completion matches, newest group first."""
    try:
        text = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    except re.error as error:
        raise ConfigInvalid(f"Invalid regular expression: {error}.", hint="Escape ( [ . * + ? with \\.") from None
    print_samples(_find(load(config_file, settings), chosen, text), as_json)


def _find(config: Config, chosen: SampleOptions, text: re.Pattern[str] | None = None) -> "list[Shown]":
    from coordinator.audit.case import RoundArchive
    from coordinator.commands import sample_records

    wanted = sample_records.SampleFilter(chosen.version, chosen.node, chosen.reward_min, chosen.reward_max, text)
    fixed.require_round(config.round.directory)
    with closing(RoundArchive(config)) as archive:
        return sample_records.of_round(archive, config, wanted, chosen.limit)


def print_samples(samples: "list[Shown]", as_json: bool) -> None:
    """Print samples."""
    if as_json:
        # This is the only control character that JSON does not escape.
        typer.echo(
            json.dumps([asdict(sample) for sample in samples], indent=2, allow_nan=False).replace("\x7f", "\\u007f")
        )
        return
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for sample in samples:
        typer.echo(f"{_head(sample)}\n{terminal.block(sample.prompt, columns)}")
        typer.echo(f"  answered\n{terminal.block(sample.completion, columns)}\n")
    if not samples:
        typer.echo("No samples match.")


def _head(sample: "Shown") -> str:
    """Return everything except the texts, in two lines."""
    said = [sample.status if sample.reward is None else f"reward {sample.reward:g}"]
    if list(sample.components.values()) != [sample.reward]:  # one function alone is the reward
        said += [f"{visible(name, NAME_MAX_CHARS)} {_number(value)}" for name, value in sample.components.items()]
    said += ["invalid form"] if sample.status == "invalid" else []
    said += [] if sample.advantage is None else [f"advantage {sample.advantage:+.3g}"]
    trained = sample.state if sample.trained_in is None else f"trained on in update {sample.trained_in}"
    when = f"{datetime.fromtimestamp(sample.accepted_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"
    return (
        f"{', '.join(said)}\n"
        f"{when}  version {sample.version}, update {sample.update}, {trained}, by "
        f"{readable(sample.name, sample.node_id)} ({sample.nickname}), "
        f"sample {sample.sample} of claim {sample.claim_id[:8]}"
    )


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:g}"
