"""Tensors of a policy folder on torch, without copies.

- This module does not need `transformers`, whose import takes seconds of every start.
- The header of a file (names, shapes, length) is checked before the first byte of a tensor is read.
- In a swap the model's own tensors are compared with the files, bit for bit: a layer, a head or a half that was left
  from the previous version is too similar for the canary to detect in bf16. Each is compared after it is copied, while
  its values are at hand: no two places share memory, so nothing overwrites it later.
- An adapter is added to the base's tensors from their files, one at a time while they are copied: there is never a
  second model in memory, and nothing of the previous version remains.
- A version with the base of the one before costs its adapter: only tensors that one of both adapters changes are
  computed, copied and compared. The same base means the same files on this disk, unchanged since; versions and rounds
  share them by hard links. A base stays mapped while its adapter is loaded, so that no other file can get the number of
  one of its files.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import safe_open

from protocol.policy import adapter
from swarm_exact.merging import merged
from swarm_node.engine.policy_files import read_adapter, tensor_files

log = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]
Places = Mapping[str, tuple[torch.Tensor, torch.Size]]
"""The place of each tensor by name, and the tensor's shape: that of the place, one with as many values, or one that the
place repeats."""

BaseFiles = frozenset[tuple[int, ...]]
"""The device, number, size and time of change of each file that holds tensors of a base."""

PIECE_VALUES = 2**24
"""Values compared at once, so that a full device needs no second copy of a large tensor."""

SHORT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Names of precisions in tolerances."""


def numerics(device: torch.device, dtype: torch.dtype) -> str:
    """Return the class of numerics of this device and precision."""
    # torch calls a card of AMD cuda, but its rounding is another one
    place = "rocm" if device.type == "cuda" and torch.version.hip else device.type
    return f"torch/{SHORT_NAMES[dtype]}/{place}"


class PolicyTensors(Mapping[str, torch.Tensor]):
    """Tensors of a policy by name, with the adapter's product added; each is computed on access."""

    def __init__(self, base: Tensors, scale: float | None, matrices: Tensors, files: BaseFiles = frozenset()) -> None:
        self._base, self._scale, self._matrices = base, scale, matrices
        self.files = files
        self.shapes = {name: tensor.shape for name, tensor in base.items()}
        self.adapted = frozenset(adapter.adapted(matrices)) if scale is not None else frozenset[str]()
        for name in self.adapted:
            (down, up), shape = (matrices[part].shape for part in adapter.names(name)), self.shapes.get(name)
            if len(down) != 2 or len(up) != 2 or shape != (up[0], down[1]) or up[1] != down[0]:
                raise ValueError(f"the adapter's matrices do not fit {name}")

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.on(name, torch.device("cpu"))

    def on(self, name: str, device: torch.device) -> torch.Tensor:
        """Return a tensor; an adapted one is computed on `device`."""
        weight = self._base[name]
        if name not in self.adapted or self._scale is None:
            return weight
        down, up = (self._matrices[part].to(device) for part in adapter.names(name))
        return merged(name, weight.to(device), down, up, self._scale)

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


@contextmanager
def mapped_tensors(folder: Path) -> Iterator[PolicyTensors]:
    """Map all tensors of the folder's safetensors files into memory, by name, for the duration of the block."""
    scale = read_adapter(folder)
    with ExitStack() as stack:
        parts = tensor_files(folder)
        base = _mapped(stack, parts)
        matrices = _mapped(stack, [folder / adapter.WEIGHTS]) if scale is not None else {}
        yield PolicyTensors(base, scale, matrices, frozenset(map(_identity, parts)))


def _identity(file: Path) -> tuple[int, ...]:
    at = file.stat()
    return at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns


def _mapped(stack: ExitStack, parts: Iterable[Path]) -> Tensors:
    tensors: Tensors = {}
    for part in parts:
        file = stack.enter_context(safe_open(part, framework="pt"))
        for name in file.keys():  # noqa: SIM118  # a file of safetensors is no mapping
            if name in tensors:
                raise ValueError(f"two files hold {name}")
            tensors[name] = file.get_tensor(name)
    return tensors


class ModelTensors:
    """The tensors of a model, into which policies are copied."""

    def __init__(self, places: Places, ignored: frozenset[str]) -> None:
        self._places, self._ignored = places, ignored
        self._loaded: PolicyTensors | None = None
        """The adapted policy in the model; None if it has no adapter, or if the copying failed."""

    def fill(self, folder: Path) -> list[str]:
        """Copy a folder's tensors; if some do not fit, change nothing and return their names."""
        with mapped_tensors(folder) as tensors:
            wrong = self._misfits(tensors)
            if not wrong:
                self._copy(tensors, self._changed(tensors), {})
            return wrong

    def swap(self, folder: Path, *, used: Callable[[], Places]) -> bool:
        """Overwrite the tensors with a folder's tensors.

        Return False if the folder has other tensors (then nothing is written), or if the model does not use the written
        values: `used` returns its tensors. In both cases the model must be rebuilt.
        """
        with mapped_tensors(folder) as tensors:
            if self._misfits(tensors):
                return False
            stale = self._copy(tensors, self._changed(tensors), used())
        if stale:
            log.warning("%d tensors are not those of %s after a swap: %s", len(stale), folder, ", ".join(stale[:5]))
        return not stale

    def _misfits(self, tensors: PolicyTensors) -> list[str]:
        """Return the names of the tensors that are missing, unknown, or of another shape."""
        wrong = self._places.keys() ^ (tensors.keys() - self._ignored)
        for name, (_, shape) in self._places.items():
            if name in tensors and tensors.shapes[name] != shape:
                wrong.add(name)
        return sorted(wrong)

    def _changed(self, tensors: PolicyTensors) -> frozenset[str]:
        """Return the names of the tensors that may differ from those in the model."""
        if self._loaded is None or self._loaded.files != tensors.files:
            return frozenset(self._places)
        return self._loaded.adapted | tensors.adapted

    def _copy(self, tensors: PolicyTensors, names: frozenset[str], used: Places) -> list[str]:
        """Copy these tensors; return the names of those that are not in the places that the model uses then."""
        stale = []
        self._loaded = None  # until every tensor is in its place
        for name, (place, _) in self._places.items():
            if name in names:
                given = tensors.on(name, place.device)
                place.copy_(given.view(place.shape) if given.numel() == place.numel() else given)
                if name in used and not _is_same(used[name][0], given):
                    stale.append(name)
        self._loaded = tensors if tensors.adapted else None
        return stale


def _is_same(place: torch.Tensor, given: torch.Tensor) -> bool:
    given = given.view(place.shape) if given.numel() == place.numel() else given.expand(place.shape)
    if not place.dim():
        return torch.equal(place, given.to(place.device, place.dtype))
    rows = max(1, PIECE_VALUES * len(place) // max(1, place.numel()))
    return all(
        torch.equal(place[first : first + rows], given[first : first + rows].to(place.device, place.dtype))
        for first in range(0, len(place), rows)
    )
