"""The tensors of a policy folder on torch, without a copy.

- Nothing here needs `transformers`, whose import takes seconds of every start.
- What a file says of itself (names, shapes, length) is checked before the first byte of a tensor is read.
- An adapter is added to the base's own tensors, from the disk, one at a time on their way to their places: there is
  never a second model in memory, and nothing of the version before in the next.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import safe_open

from protocol import adapter
from swarm_node.engine.policy_files import read_adapter, tensor_files

Tensors = dict[str, torch.Tensor]
Places = Mapping[str, tuple[torch.Tensor, torch.Size]]
"""Where a tensor of this name belongs, and the shape that it must have: the place's own, or of as many values, or one
that the place repeats."""


CANARY_TOLERANCE_NATS = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.15}
"""Measured on sound weights: 2e-6 at worst in float32, 4e-2 in bf16. In an untrained model of two layers, a projection
scaled by a tenth gives 8e-3, keys in the place of queries 0.16: bf16 shows only the grossest."""

SHORT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""As tolerances call them."""


def numerics(device: torch.device, dtype: torch.dtype) -> str:
    """The class of what computes so."""
    return f"torch/{SHORT_NAMES[dtype]}/{device.type}"


class PolicyTensors(Mapping[str, torch.Tensor]):
    """The tensors of a policy by name, an adapter's product in them, each made when it is asked for."""

    def __init__(self, base: Tensors, scale: float | None, matrices: Tensors) -> None:
        self._base, self._scale, self._matrices = base, scale, matrices
        self.shapes = {name: tensor.shape for name, tensor in base.items()}
        self._adapted = frozenset(adapter.adapted(matrices)) if scale is not None else frozenset()
        for name in self._adapted:
            (down, up), shape = (matrices[part].shape for part in adapter.names(name)), self.shapes.get(name)
            if len(down) != 2 or len(up) != 2 or shape != (up[0], down[1]) or up[1] != down[0]:
                raise ValueError(f"the adapter's matrices do not fit {name}")

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.on(name, torch.device("cpu"))

    def on(self, name: str, device: torch.device) -> torch.Tensor:
        """A tensor, computed on this device if it has to be."""
        weight = self._base[name]
        if name not in self._adapted or self._scale is None:
            return weight
        down, up = (self._matrices[part].to(device).float() for part in adapter.names(name))
        return torch.add(weight.to(device).float(), up @ down, alpha=self._scale).to(weight.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


@contextmanager
def mapped_tensors(folder: Path) -> Iterator[PolicyTensors]:
    """All tensors of the folder's safetensors files by name, mapped into memory for the time of the block."""
    scale = read_adapter(folder)
    with ExitStack() as stack:
        base = _mapped(stack, tensor_files(folder))
        yield PolicyTensors(base, scale, _mapped(stack, [folder / adapter.WEIGHTS]) if scale is not None else {})


def _mapped(stack: ExitStack, parts: Iterable[Path]) -> Tensors:
    found: Tensors = {}
    for part in parts:
        file = stack.enter_context(safe_open(part, framework="pt"))
        for name in file.keys():  # noqa: SIM118  # a file of safetensors is no mapping
            if name in found:
                raise ValueError(f"two files hold {name}")
            found[name] = file.get_tensor(name)
    return found


def fill(places: Places, folder: Path, ignored: frozenset[str]) -> list[str]:
    """Copy a folder's tensors into the places that are there; if some do not fit, change nothing and name them."""
    with mapped_tensors(folder) as tensors:
        wrong = places.keys() ^ (tensors.keys() - ignored)
        wrong |= {name for name, (_, shape) in places.items() if name in tensors and tensors.shapes[name] != shape}
        if not wrong:
            for name, (place, _) in places.items():
                given = tensors.on(name, place.device)
                place.copy_(given.view(place.shape) if given.numel() == place.numel() else given)
        return sorted(wrong)
