"""The files of a policy folder: its configuration, and its tensors without a copy.

- Nothing here needs `transformers`, whose import takes seconds of every start.
- What a file says of itself (names, shapes, length) is checked before the first byte of a tensor is read.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

Tensors = dict[str, torch.Tensor]
Places = Mapping[str, tuple[torch.Tensor, torch.Size]]
"""Where a tensor of this name belongs, and the shape that it must have."""


def read_config(folder: Path) -> dict[str, Any]:
    """What config.json says."""
    return _read_object(folder / "config.json")


def read_generation_config(folder: Path) -> dict[str, Any]:
    """What generation_config.json says, which not every policy has."""
    file = folder / "generation_config.json"
    return _read_object(file) if file.exists() else {}


def _read_object(file: Path) -> dict[str, Any]:
    value = json.loads(file.read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"{file.name} is no object")
    return value


@contextmanager
def mapped_tensors(folder: Path) -> Iterator[Tensors]:
    """All tensors of the folder's safetensors files by name, mapped into memory for the time of the block."""
    parts = sorted(folder.glob("*.safetensors"))
    if not parts:
        raise ValueError("there is no *.safetensors file")
    found: Tensors = {}
    with ExitStack() as stack:
        for part in parts:
            file = stack.enter_context(safe_open(part, framework="pt"))
            for name in file.keys():  # noqa: SIM118  # a file of safetensors is no mapping
                if name in found:
                    raise ValueError(f"two files hold {name}")
                found[name] = file.get_tensor(name)
        yield found


def fill(places: Places, folder: Path, ignored: frozenset[str]) -> list[str]:
    """Copy a folder's tensors into the places that are there; if some do not fit, change nothing and name them."""
    with mapped_tensors(folder) as tensors:
        wrong = places.keys() ^ (tensors.keys() - ignored)
        wrong |= {name for name, (_, shape) in places.items() if name in tensors and tensors[name].shape != shape}
        if not wrong:
            for name, (place, _) in places.items():
                place.copy_(tensors[name])
        return sorted(wrong)
