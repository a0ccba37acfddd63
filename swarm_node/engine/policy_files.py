"""The small files of a policy folder, which say what its tensors are; read without torch.

- A folder with a file of an unknown kind, or a configuration that names code, is refused before any library sees it:
  that none of it is run is then not for their defaults to decide.
- So is a configuration that promises more than the folder's tensors bear out (`protocol.policy.model_config`).
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from protocol import limits
from protocol.errors import PatchInvalid
from protocol.policy import adapter, model_config, tensors
from protocol.policy.manifest import POLICY_SUFFIXES


def read_config(folder: Path) -> dict[str, Any]:
    """What config.json says, in a folder of numbers and text."""
    for file in sorted(folder.iterdir()):
        if file.suffix not in POLICY_SUFFIXES:
            raise ValueError(f"{file.name} is neither numbers nor text")
    config = _read_object(folder / "config.json")
    model_config.require_plain(config)
    return config


def require_layers(folder: Path, config: dict[str, Any]) -> None:
    """Refuse a configuration of more layers than the folder has tensors for."""
    model_config.require_layers(config, sum(map(_count, tensor_files(folder))))


def require_borne_out(folder: Path, parameters: int) -> None:
    """Refuse a model of more numbers than the folder's tensors can hold."""
    model_config.require_borne_out(parameters, sum(file.stat().st_size for file in tensor_files(folder)))


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


def _count(file: Path) -> int:
    """How many tensors a file has, by its header."""
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            prefix = opened.read(tensors.PREFIX_BYTES)
            length = min(int.from_bytes(prefix, "little"), limits.TENSORS_HEADER_MAX_BYTES)
            header = tensors.header_of(memoryview(prefix + opened.read(length)))
        return len(tensors.layout(header, size))
    except PatchInvalid as error:
        raise ValueError(f"{file.name}: {error.message}") from None


def _read_object(file: Path) -> dict[str, Any]:
    if file.stat().st_size > limits.POLICY_CONFIG_MAX_BYTES:
        raise ValueError(f"{file.name} is larger than {limits.POLICY_CONFIG_MAX_BYTES} bytes")
    try:
        value = json.loads(file.read_bytes())
    except RecursionError:
        raise ValueError(f"{file.name} is nested without end") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file.name} is no object")
    return value
