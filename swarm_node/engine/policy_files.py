"""The small files of a policy folder, which say what its tensors are; read without torch."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from protocol import adapter


def read_config(folder: Path) -> dict[str, Any]:
    """What config.json says."""
    return _read_object(folder / "config.json")


def read_generation_config(folder: Path) -> dict[str, Any]:
    """What generation_config.json says, which not every policy has."""
    file = folder / "generation_config.json"
    return _read_object(file) if file.exists() else {}


def read_adapter(folder: Path) -> float | None:
    """What an adapter in this folder is multiplied by; None where there is none."""
    file = folder / adapter.CONFIG
    return adapter.scale(file.read_bytes()) if file.exists() else None


@contextmanager
def without_adapter(folder: Path) -> Iterator[Path]:
    """The folder for those who would make something of their own of an adapter: without it, while the block lasts."""
    if not (folder / adapter.CONFIG).exists():
        yield folder
        return
    with TemporaryDirectory(prefix="echo-swarm-") as scratch:
        for file in folder.iterdir():
            if file.name not in adapter.FILES:
                (Path(scratch) / file.name).symlink_to(file.absolute())
        yield Path(scratch)


def tensor_files(folder: Path) -> list[Path]:
    """The files with its own tensors, an adapter's apart; there is at least one."""
    parts = sorted(path for path in folder.glob("*.safetensors") if path.name != adapter.WEIGHTS)
    if not parts:
        raise ValueError("there is no *.safetensors file")
    return parts


def _read_object(file: Path) -> dict[str, Any]:
    value = json.loads(file.read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"{file.name} is no object")
    return value
