"""Arguments and options that most commands share, and the check that the files named in settings exist.

Files on the hub, and the contents of files, are checked when they are fetched and read.
"""

from pathlib import Path
from typing import Annotated

import typer

from coordinator.config import Config
from coordinator.learner import start
from coordinator.tasks.kinds import require_known
from protocol.errors import ConfigInvalid

ConfigFile = Annotated[Path, typer.Argument(metavar="ROUND.toml", help="The round's TOML file.")]
Settings = Annotated[
    list[str],
    typer.Option(
        "--set",
        default_factory=list,
        show_default=False,
        help="Override a setting of the file, as section.key=value; repeatable.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print all data as JSON.")]
EXIT_CODES = "Exit codes: 0 done, 1 failed, 2 a setting is wrong."


def require(config: Config) -> None:
    """Raise an error that names the first missing file or unknown task."""
    require_known(config.task.name)
    for key, place in _files(config):
        if not Path(place).exists():
            raise ConfigInvalid(f"{key}: {place} does not exist.", hint="Relative paths start at the current folder.")
    start.require_here(config.model)


def _files(config: Config) -> list[tuple[str, str]]:
    """Return the operator's files and folders, each with the setting that names it."""
    named = [("task.name", config.task.name if config.task.name.endswith(".py") else "")]
    named += [("data.train", config.data.train), ("data.eval", config.data.eval)]
    named += [("reward.functions", place.rpartition(":")[0]) for place in config.reward.functions if ".py:" in place]
    return [(key, place) for key, place in named if place and not place.startswith(start.HUB)]
