"""The newest complete checkpoint of a running learner, held as a whole.

- The learner may replace it at any time: the new one gets its name, then the old one is deleted. So a checkpoint that
  is still the newest after all its files were held was complete; otherwise the next one is tried.
- A held checkpoint is read as the learner will read it, so that training can resume from every backup.
"""

import shutil
from pathlib import Path

from coordinator.base.files import link_or_copy
from coordinator.service.backup.archive import BackupInvalid
from protocol.errors import ConfigInvalid

FOLDER = "checkpoints"

NOT_SAVED = (FOLDER, "publishing", "taking", "ranks", "retracting")
"""Names in the learner's folder that are held here, or created again when needed."""

ATTEMPTS = 20
"""Attempts to hold a checkpoint, which takes milliseconds; it is replaced every few updates."""


def hold_checkpoint(checkpoints: Path, place: Path) -> dict[str, Path]:
    """Hold the newest checkpoint in `place`; return its files by name, none before the first checkpoint."""
    from coordinator.learner import checkpoint  # torch

    for _ in range(ATTEMPTS):
        newest = checkpoint.newest(checkpoints)
        if newest is None:
            return {}
        shutil.rmtree(place, ignore_errors=True)
        held = place / newest.name
        held.mkdir(parents=True)
        try:
            for file in sorted(newest.iterdir()):
                link_or_copy(file, held / file.name)
        except FileNotFoundError:
            continue
        if checkpoint.newest(checkpoints) == newest:
            _require_readable(held, newest)
            return {f"{newest.name}/{file.name}": file for file in sorted(held.iterdir())}
    raise BackupInvalid("The learner replaced its checkpoint at every attempt.", hint="Try again.")


def _require_readable(held: Path, path: Path) -> None:
    from coordinator.learner import checkpoint

    try:
        checkpoint.require_whole(held)
    except ConfigInvalid as error:
        raise BackupInvalid(
            f"The learner's checkpoint {path} cannot be read. No backup was made. ({error})",
            hint="Keep older backups. Try again after the next version, which makes a new checkpoint.",
        ) from error
