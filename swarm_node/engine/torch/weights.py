"""The tensors of a policy folder on torch, without a copy.

- Nothing here needs `transformers`, whose import takes seconds of every start.
- What a file says of itself (names, shapes, length) is checked before the first byte of a tensor is read.
- After a swap the model's own tensors are compared with the files, bit for bit: a layer, a head or a half that stayed
  from the version before is too near to the new one for the canary to find it in bf16.
- An adapter is added to the base's own tensors, from the disk, one at a time on their way to their places: there is
  never a second model in memory, and nothing of the version before in the next.
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
"""Where a tensor of this name belongs, and the shape that it must have: the place's own, or of as many values, or one
that the place repeats."""

PIECE_VALUES = 2**24
"""Values that are compared at once, so that no second copy of a large tensor is made on a full device."""

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


def swap(places: Places, folder: Path, ignored: frozenset[str], *, used: Callable[[], Places]) -> bool:
    """Write a folder's tensors over those that are there.

    Return False if the folder has other tensors, and nothing is written then, or if the model does not use what was
    written: `used` returns its tensors as they are afterwards. The model must be built anew in both cases.
    """
    if fill(places, folder, ignored):
        return False
    if stale := differing(used(), folder):
        log.warning("%d tensors are not those of %s after a swap: %s", len(stale), folder, ", ".join(stale[:5]))
    return not stale


def differing(places: Places, folder: Path) -> list[str]:
    """Return the names of the tensors that are not the same, bit for bit, as those of a folder."""
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
