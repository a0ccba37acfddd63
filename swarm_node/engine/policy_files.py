"""The small files of a policy folder, which say what its tensors are; read without torch."""

import json
from pathlib import Path
from typing import Any


def read_config(folder: Path) -> dict[str, Any]:
    """What config.json says."""
    return _read_object(folder / "config.json")


def read_generation_config(folder: Path) -> dict[str, Any]:
    """What generation_config.json says, which not every policy has."""
    file = folder / "generation_config.json"
    return _read_object(file) if file.exists() else {}


def tensor_files(folder: Path) -> list[Path]:
    """The files with its tensors; there is at least one."""
    parts = sorted(folder.glob("*.safetensors"))
    if not parts:
        raise ValueError("there is no *.safetensors file")
    return parts


def _read_object(file: Path) -> dict[str, Any]:
    value = json.loads(file.read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"{file.name} is no object")
    return value
