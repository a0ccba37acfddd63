"""A checkpoint file: whole or not there, whatever kills the writer.

- It is written beside the old one, synced, renamed over it, and the rename is synced, too: at any moment one whole
  checkpoint has the name. What a kill left half-written is overwritten by the next.
- It holds tensors and plain values only, so that reading one runs nobody's code.
"""

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from protocol.errors import ConfigInvalid


def write(path: Path, state: dict[str, Any]) -> None:
    """Put the state in place of what was there."""
    beside = path.with_name(path.name + ".new")
    with beside.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself must survive a power cut
    finally:
        os.close(folder)


def read(path: Path) -> dict[str, Any]:
    """The state as it was written."""
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigInvalid(f"{path} is no checkpoint that can be read: {reason}") from error
    return state
