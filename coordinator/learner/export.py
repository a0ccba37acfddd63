"""A policy out of a round, as a folder that transformers and everybody else can load.

- The learner's checkpoint is the newest policy there is; a published version is what nodes had.
- An adapter is merged into its base, unless it is asked for alone, as peft has it.
- The folder appears whole or not at all, and never over another.
"""

import json
import shutil
from pathlib import Path

from coordinator.audit.case import RoundArchive
from coordinator.config import Config
from coordinator.publishing.best import FILE, kept
from protocol import canary
from protocol.adapter import CONFIG
from protocol.errors import ConfigInvalid, NotFound


def export(config: Config, target: Path, *, version: int = 0, adapter: bool = False, best: bool = False) -> int:
    """Write a version, the best one, or at 0 the learner's last checkpoint; returns the update that it stands at."""
    if target.exists():
        raise ConfigInvalid(f"{target} is there already.", hint="Name a folder that is not.")
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f"{target.name}.new")
    shutil.rmtree(beside, ignore_errors=True)
    make = _best if best else _version if version else _checkpoint
    update = make(config, beside, version, adapter)
    beside.rename(target)
    return update


def _version(config: Config, folder: Path, version: int, adapter: bool) -> int:
    archive = RoundArchive(config)
    try:
        update = archive.write_policy(version, folder)
    finally:
        archive.close()
    if update is None:
        raise NotFound(f"Version {version} was not published, or is not kept any more.")
    _fold(folder, version, adapter)
    return update


def _best(config: Config, folder: Path, _version: int, adapter: bool) -> int:
    version = kept(config.round.directory)
    if version is None:
        raise NotFound("No version was evaluated to the end yet.", hint="Set eval.every, or name one by --version.")
    shutil.copytree(config.round.directory / "best" / str(version), folder)
    about = json.loads((folder / FILE).read_text())
    _fold(folder, version, adapter)
    return int(about[0]["update"])


def _fold(folder: Path, version: int, adapter: bool) -> None:
    """An adapter into its base, or by itself."""
    if (folder / CONFIG).exists():
        from coordinator.learner import adapter_files

        (adapter_files.keep_adapter if adapter else adapter_files.merge)(folder)
    elif adapter:
        raise NotFound(f"Version {version} has no adapter: its weights were published whole.")


def _checkpoint(config: Config, folder: Path, _version: int, adapter: bool) -> int:
    from coordinator.learner import checkpoint
    from coordinator.learner.policy import Policy
    from coordinator.learner.settings import train_settings

    learner = config.round.directory / "learner"
    last = checkpoint.newest(learner / "checkpoints")
    if last is None:
        raise NotFound(f"There is no checkpoint in {learner}.", hint="Name a published version with --version.")
    if adapter and not config.learner.lora_rank:
        raise NotFound("This round trains no adapter.", hint="learner.lora_rank is 0: export the policy whole.")
    policy = Policy(learner / "start", train_settings(config))
    policy.restore(last)
    if adapter:
        policy.save_adapter(folder, config.model.path)
        (folder / canary.FILE_NAME).unlink()
    else:
        policy.save_hub(folder)
    return policy.update
