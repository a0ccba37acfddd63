"""The files of a policy folder: its configuration, its end tokens, and its tensors without a copy.

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
    config = json.loads((folder / "config.json").read_bytes())
    if not isinstance(config, dict):
        raise ValueError("config.json is no object")
    return config


def end_tokens(folder: Path, config: dict[str, Any]) -> list[int]:
    """The tokens that end a completion; a policy may have several, and may name them in either of two files."""
    named = config.get("eos_token_id")
    generation = folder / "generation_config.json"
    if generation.exists():
        named = json.loads(generation.read_bytes()).get("eos_token_id") or named
    if named is None:
        raise ValueError("neither config.json nor generation_config.json names an end token")
    return [named] if isinstance(named, int) else [int(token) for token in named]


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
