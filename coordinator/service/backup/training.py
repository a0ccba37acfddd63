"""The newest whole checkpoint of a learner that goes on meanwhile, held as one.

- The learner replaces it whenever it likes: the new one gets its name, then the old one goes. So one that is still the
  newest after every file of it was held was whole while that was done; else the next is taken.
- What is held is read as the learner will read it: a backup that no training can go on from is not made.
"""

import os
import shutil
from pathlib import Path

from coordinator.service.backup.archive import BackupInvalid
from protocol.errors import ConfigInvalid

FOLDER = "checkpoints"

NOT_SAVED = (FOLDER, "publishing", "taking", "ranks")
"""Of the learner's folder: held here, or made again when they are wanted."""

ATTEMPTS = 20
"""A checkpoint is replaced every few updates, and a second name for its files takes milliseconds."""


def hold_checkpoint(checkpoints: Path, place: Path) -> dict[str, Path]:
    """The files of the newest checkpoint by their names in it, held in a folder; none before the first."""
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
                second_name(file, held / file.name)
        except FileNotFoundError:
            continue
        if checkpoint.newest(checkpoints) == newest:
            _require_readable(held, newest)
            return {f"{newest.name}/{file.name}": file for file in sorted(held.iterdir())}
    raise BackupInvalid("The learner replaced its checkpoint at every attempt.", hint="Try again.")


def second_name(path: Path, held: Path) -> None:
    """Hold on to a file as it is now."""
    try:
        os.link(path, held)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        shutil.copyfile(path, held)


def _require_readable(held: Path, path: Path) -> None:
    from coordinator.learner import checkpoint

    try:
        checkpoint.require_whole(held)
    except ConfigInvalid as error:
        raise BackupInvalid(
            f"The learner's checkpoint {path} cannot be read: nothing is saved. ({error})",
            hint="Keep older backups. The next checkpoint, at the next version, may be whole: try again after it.",
        ) from error
