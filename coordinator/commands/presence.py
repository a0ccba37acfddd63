"""Whether what settings name is on this machine: looked at before anything is made of it.

What is on the hub, and what files say, is found out when they are fetched and read.
"""

from pathlib import Path

from coordinator.config import Config
from coordinator.data.kinds import require_known
from coordinator.learner import start
from protocol.errors import ConfigInvalid


def require(config: Config) -> None:
    """Name the first thing that is missing."""
    require_known(config.task.name)
    for key, place in _files(config):
        if not Path(place).exists():
            raise ConfigInvalid(f"{key}: there is no {place}.", hint="Relative paths begin where you are.")
    start.require_here(config.model)


def _files(config: Config) -> list[tuple[str, str]]:
    """Files and folders of the operator's, each with the setting that names it."""
    named = [("task.name", config.task.name if config.task.name.endswith(".py") else "")]
    named += [("data.train", config.data.train), ("data.eval", config.data.eval)]
    named += [("reward.functions", place.rpartition(":")[0]) for place in config.reward.functions if ".py:" in place]
    return [(key, place) for key, place in named if place and not place.startswith(start.HUB)]
