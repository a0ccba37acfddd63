"""A policy out of a round, as a folder that transformers and everybody else can load.

- The learner's checkpoint is the newest policy there is; a published version is what nodes had.
- The folder appears whole or not at all, and never over another.
"""

import shutil
from pathlib import Path

from coordinator.audit.case import RoundArchive
from coordinator.config import Config
from protocol.errors import ConfigInvalid, NotFound


def export(config: Config, target: Path, *, version: int = 0) -> int:
    """Write a version, or at 0 the learner's last checkpoint; returns the update that it stands at."""
    if target.exists():
        raise ConfigInvalid(f"{target} is there already.", hint="Name a folder that is not.")
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    return _version(config, target, version) if version else _checkpoint(config, target)


def _version(config: Config, target: Path, version: int) -> int:
    archive = RoundArchive(config)
    try:
        update = archive.write_policy(version, target)
    finally:
        archive.close()
    if update is None:
        raise NotFound(f"Version {version} was not published, or is not kept any more.")
    return update


def _checkpoint(config: Config, target: Path) -> int:
    from coordinator.learner.policy import Policy
    from coordinator.learner.settings import train_settings

    folder = config.round.directory / "learner"
    if not (folder / "checkpoint.pt").exists():
        raise NotFound(f"There is no checkpoint in {folder}.", hint="Name a published version with --version.")
    policy = Policy(folder / "start", train_settings(config))
    policy.restore(folder / "checkpoint.pt")
    beside = target.with_name(f"{target.name}.new")
    shutil.rmtree(beside, ignore_errors=True)
    policy.save_hub(beside)
    beside.rename(target)
    return policy.update
