"""Being the one leader of a round's folder, with settings that its history allows.

- One process of a round trains, publishes, plans and signs; a lock in the folder says that it is there.
- While it is, it touches the lock every second: whoever finds it free knows since when nobody leads, whatever ended it.
"""

import fcntl
from pathlib import Path
from typing import IO

from coordinator.config import Config
from coordinator.data.child import prepare
from coordinator.files import write_durably
from protocol.errors import ConfigInvalid

LOCK = "coordinator.lock"

FIXED = (
    "round.seed",
    "model.path",
    "model.revision",
    "task.name",
    "task.parameters",
    "data.train",
    "data.eval",
    "data.revision",
    "data.columns",
    "data.chat",
    "data.suffix",
    "data.shuffle",
    "data.size",
    "sampling.temperature",
    "sampling.samples_per_group",
    "sampling.max_new_tokens",
    "learner.groups_per_update",
    "learner.lora_rank",
    "market.budget_micros",
    "store.url",
)
"""Settings that batches, versions, leases or the ledger of a round were counted with."""


def only_coordinator(folder: Path) -> IO[str]:
    """One coordinator per round: two would sign the same version numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / LOCK).open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ConfigInvalid(
            f"A coordinator is running in {folder}.", hint="Stop it, or choose another round.directory."
        ) from None
    return lock


def led_until_ms(folder: Path) -> int | None:
    """When the last coordinator was there; None while one is."""
    try:
        with only_coordinator(folder):
            return int((folder / LOCK).stat().st_mtime * 1000)
    except ConfigInvalid:
        return None


def touch(folder: Path) -> None:
    """Say that we still lead."""
    (folder / LOCK).touch()


def lead(config: Config) -> IO[str]:
    """Be the round's one leader, with settings that its history allows."""
    folder = config.round.directory
    resolved = folder / "resolved.json"
    _check_settings(resolved, config)
    lock = only_coordinator(folder)
    try:
        prepare(config, anew=not resolved.exists())
        write_durably(resolved, config.model_dump_json(indent=2).encode(), private=True)
    except BaseException:  # raised again
        lock.close()
        raise
    return lock


def _check_settings(path: Path, config: Config) -> None:
    """A round that exists goes on with the settings that its history depends on."""
    if not path.exists():
        return
    before = Config.model_validate_json(path.read_text())
    for name in FIXED:
        section, _, key = name.partition(".")
        old, new = (getattr(getattr(settings, section), key) for settings in (before, config))
        if old != new:
            raise ConfigInvalid(
                f"The round in {path.parent} was made with {name} = {old}, not {new}.",
                hint="Keep the old value, or give the new round another round.directory.",
            )
