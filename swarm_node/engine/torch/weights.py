"""Tensors of a policy folder on torch, without copies.

- This module does not need `transformers`, whose import takes seconds of every start.
- The header of a file (names, shapes, length) is checked before the first byte of a tensor is read.
- After a swap the model's own tensors are compared with the files, bit for bit: a layer, a head or a half that was left
  from the previous version is too similar for the canary to detect in bf16.
- An adapter is added to the base's tensors from the disk, one at a time while they are copied: there is never a second
  model in memory, and nothing of the previous version remains.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import safe_open

from protocol.policy import adapter
from swarm_node.engine.policy_files import read_adapter, tensor_files

log = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]
Places = Mapping[str, tuple[torch.Tensor, torch.Size]]
"""The place of each tensor by name, and the tensor's shape: that of the place, one with as many values, or one that the
place repeats."""

PIECE_VALUES = 2**24
"""Values compared at once, so that a full device needs no second copy of a large tensor."""

SHORT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Names of precisions in tolerances."""


def numerics(device: torch.device, dtype: torch.dtype) -> str:
    """Return the class of numerics of this device and precision."""
    return f"torch/{SHORT_NAMES[dtype]}/{device.type}"


class PolicyTensors(Mapping[str, torch.Tensor]):
    """Tensors of a policy by name, with the adapter's product added; each is computed on access."""

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
        """Return a tensor; an adapted one is computed on `device`."""
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
    """Map all tensors of the folder's safetensors files into memory, by name, for the duration of the block."""
    scale = read_adapter(folder)
    with ExitStack() as stack:
        base = _mapped(stack, tensor_files(folder))
        yield PolicyTensors(base, scale, _mapped(stack, [folder / adapter.WEIGHTS]) if scale is not None else {})


def _mapped(stack: ExitStack, parts: Iterable[Path]) -> Tensors:
    tensors: Tensors = {}
    for part in parts:
        file = stack.enter_context(safe_open(part, framework="pt"))
        for name in file.keys():  # noqa: SIM118  # a file of safetensors is no mapping
            if name in tensors:
                raise ValueError(f"two files hold {name}")
            tensors[name] = file.get_tensor(name)
    return tensors


def fill(places: Places, folder: Path, ignored: frozenset[str]) -> list[str]:
    """Copy a folder's tensors into `places`; if some do not fit, change nothing and return their names."""
    with mapped_tensors(folder) as tensors:
        wrong = places.keys() ^ (tensors.keys() - ignored)
        wrong |= {name for name, (_, shape) in places.items() if name in tensors and tensors.shapes[name] != shape}
        if not wrong:
            for name, (place, _) in places.items():
                given = tensors.on(name, place.device)
                place.copy_(given.view(place.shape) if given.numel() == place.numel() else given)
        return sorted(wrong)


def swap(places: Places, folder: Path, ignored: frozenset[str], *, used: Callable[[], Places]) -> bool:
    """Overwrite the tensors in `places` with a folder's tensors.

    Return False if the folder has other tensors (then nothing is written), or if the model does not use the written
    values: `used` returns its tensors after the swap. In both cases the model must be rebuilt.
    """
    if fill(places, folder, ignored):
        return False
    if stale := differing(used(), folder):
        log.warning("%d tensors are not those of %s after a swap: %s", len(stale), folder, ", ".join(stale[:5]))
    return not stale


def differing(places: Places, folder: Path) -> list[str]:
    """Return the names of the tensors that differ, in any bit, from those of a folder."""
    with mapped_tensors(folder) as tensors:
        return [name for name, (place, _) in places.items() if not _is_same(place, tensors.on(name, place.device))]


def _is_same(place: torch.Tensor, given: torch.Tensor) -> bool:
    given = given.view(place.shape) if given.numel() == place.numel() else given.expand(place.shape)
    if not place.dim():
        return torch.equal(place, given.to(place.device, place.dtype))
    rows = max(1, PIECE_VALUES * len(place) // max(1, place.numel()))
    return all(
        torch.equal(place[first : first + rows], given[first : first + rows].to(place.device, place.dtype))
        for first in range(0, len(place), rows)
    )
