"""Arguments and options that most commands of `swarm-coordinator` share."""

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path, typer.Argument(metavar="ROUND.toml", help="The round's TOML file.")]
Settings = Annotated[
    list[str],
    typer.Option(
        "--set",
        default_factory=list,
        show_default=False,
        help="section.key=value on top of the file; repeatable.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything, for scripts.")]
EXIT_CODES = "Exit codes: 0 done, 1 failed, 2 a setting is wrong."
