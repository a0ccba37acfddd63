"""The newest complete checkpoint of a running learner, for a backup.

A held checkpoint is read as the learner will read it, so that training can resume from every backup.
"""

from pathlib import Path

from coordinator.service.backup.archive import BackupInvalid
from protocol.errors import ConfigInvalid

FOLDER = "checkpoints"

NOT_SAVED = (FOLDER, "publishing", "taking", "ranks", "retracting", "current", "offered")
"""Names in the learner's folder that are held here, or created again when needed."""


def hold_checkpoint(checkpoints: Path, place: Path) -> dict[str, Path]:
    """Hold the newest checkpoint in `place`; return its files by name, none before the first checkpoint."""
    from coordinator.learner import checkpoint  # torch

    held = checkpoint.hold_newest(checkpoints, place)
    if held is None:
        return {}
    _require_readable(held, checkpoints / held.name)
    return {f"{held.name}/{file.name}": file for file in sorted(held.iterdir())}


def _require_readable(held: Path, path: Path) -> None:
    from coordinator.learner import checkpoint

    try:
        checkpoint.require_whole(held)
    except ConfigInvalid as error:
        raise BackupInvalid(
            f"The learner's checkpoint {path} cannot be read. No backup was made. ({error})",
            hint="Keep older backups. Try again after the next version, which makes a new checkpoint.",
        ) from error
