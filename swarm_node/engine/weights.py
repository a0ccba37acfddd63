"""The tensors of a policy folder on torch, without a copy.

- Nothing here needs `transformers`, whose import takes seconds of every start.
- What a file says of itself (names, shapes, length) is checked before the first byte of a tensor is read.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import safe_open

from swarm_node.engine.policy_files import tensor_files

Tensors = dict[str, torch.Tensor]
Places = Mapping[str, tuple[torch.Tensor, torch.Size]]
"""Where a tensor of this name belongs, and the shape that it must have."""


CANARY_TOLERANCE_NATS = {torch.float32: 1e-3, torch.bfloat16: 0.15}
"""Measured on sound weights: 2e-6 at worst in float32, 4e-2 in bf16. In an untrained model of two layers, a projection
scaled by a tenth gives 8e-3, keys in the place of queries 0.16: bf16 shows only the grossest."""

SHORT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
"""As tolerances call them."""


def numerics(device: torch.device, dtype: torch.dtype) -> str:
    """The class of what computes so."""
    return f"torch/{SHORT_NAMES[dtype]}/{device.type}"


@contextmanager
def mapped_tensors(folder: Path) -> Iterator[Tensors]:
    """All tensors of the folder's safetensors files by name, mapped into memory for the time of the block."""
    found: Tensors = {}
    with ExitStack() as stack:
        for part in tensor_files(folder):
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
