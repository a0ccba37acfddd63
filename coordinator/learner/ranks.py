"""The processes that train one policy together: their communication, and the sharding of the weights.

- A single process runs the same code: it has all weights, and communicates with nobody.
- All ranks make the same calls in the same order. Only rank 0 calls the coordinator, and creates or renames files.
- Weights, gradients and optimizer states are in shards, one for each rank (FSDP2); small tensors are on every rank.
- No other module of the learner uses `torch.distributed`, except for the format of checkpoints.
- There is no second model or optimizer code: FSDP2 replaces the parameters of the same modules by shards, and AdamW
  steps on those.
- Ranks trust each other: their messages are pickled. Run them on one machine, or in a network of their own.

The machine of a rank is what the bits of an update depend on, beside its state, its groups and its settings. Ranks may
be on unlike cards, or on hosts with other libraries. All kinds are recorded then: no other machine has such a name, so
a replay elsewhere that differs blames nobody.
"""

import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # torch names its own exports only for itself
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from coordinator.learner.launch import STORE
from coordinator.model.watchdog import Watchdog, show_stacks_when_told_to_end

Told = TypeVar("Told")

WAIT = timedelta(days=30)
"""The longest wait for rank 0, which itself waits for batches without limit. The watchdog ends hung work."""


class Ranks:
    """The ranks that train together, seen from this process."""

    def __init__(self, device: str = "cpu", watchdog: Watchdog | None = None) -> None:
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device(device)
        self.watchdog = watchdog or Watchdog(0.0)
        self._mesh: DeviceMesh | None = None
        if self.size > 1:
            self._join()

    @property
    def first(self) -> bool:
        return self.rank == 0

    def _join(self) -> None:
        if self.device.type == "cuda":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        show_stacks_when_told_to_end()
        store = FileStore(os.environ[STORE], self.size) if STORE in os.environ else None
        backend = "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=WAIT)
        self._mesh = init_device_mesh(self.device.type, (self.size,))

    def leave(self) -> None:
        """Leave the process group, when all work is done."""
        if self.size > 1:
            dist.destroy_process_group()

    def broadcast(self, what: Told, source: int = 0) -> Told:
        """Return `what` of rank `source` on every rank; the values of the others are ignored."""
        if self.size == 1:
            return what
        box = [what]
        dist.broadcast_object_list(box, src=source, device=torch.device("cpu"))
        return box[0]

    def gather_values(self, what: Told) -> list[Told]:
        """Return what each rank has, in order, on every rank."""
        return [self.broadcast(what, rank) for rank in range(self.size)]

    def meet(self) -> None:
        """Wait for all ranks."""
        self.total(torch.zeros(1))

    def total(self, table: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, computed in place."""
        if self.size > 1:
            dist.all_reduce(table)
        return table

    def deal(self, pieces: Iterable[Told]) -> Iterator[tuple[Told, bool]]:
        """Yield this rank's share of `pieces`, each with True if it is its own.

        Every rank gets the same number, as weights are gathered by all ranks or none. Surplus pieces are computed and
        not used.
        """
        all_pieces = list(pieces)
        for start in range(0, len(all_pieces), self.size):
            self.watchdog.moved()
            place = start + self.rank
            yield (all_pieces[place], True) if place < len(all_pieces) else (all_pieces[start], False)

    def shard(self, model: Any) -> None:
        """Keep only this rank's rows of every weight; each layer gathers its weights when it is computed."""
        if self._mesh is None:
            return
        for layer in model.get_decoder().layers:
            fully_shard(layer, mesh=self._mesh)
        # Otherwise the root's weights would stay gathered after a pass without gradient, and miss the next update.
        fully_shard(model, mesh=self._mesh, reshard_after_forward=True)

    def forward(self, model: Any, function: Callable[..., Any]) -> None:
        """Make `function` a method of the model, for which sharded weights are gathered as for its forward pass."""
        setattr(model, function.__name__, MethodType(function, model))
        register_fsdp_forward_method(model, function.__name__)

    def join_gradients(self, weights: Sequence[torch.Tensor]) -> None:
        """Average the gradients of weights that are on every rank, as FSDP has done with those in shards."""
        for weight in weights:
            if self.size > 1 and weight.grad is not None and not isinstance(weight, DTensor):
                self.total(weight.grad.div_(self.size))

    def clip(self, weights: Sequence[torch.Tensor], longest: float) -> float:
        """Clip the whole gradient to the norm `longest`; return its norm before that."""
        norm = torch.nn.utils.clip_grad_norm_(weights, longest)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a tensor, in its own memory."""
        rows: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return rows.detach()

    def rows(self, tensor: torch.Tensor) -> slice:
        """Return the position of this rank's rows in the whole tensor."""
        if not isinstance(tensor, DTensor):
            return slice(0, len(tensor))
        each = -(-len(tensor) // self.size)
        return slice(min(self.rank * each, len(tensor)), min((self.rank + 1) * each, len(tensor)))

    def gather(self, rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
        """Return the whole tensor, of which each rank has rows as it has of `like`; in rank 0's memory alone."""
        self.watchdog.moved()
        if isinstance(like, DTensor):
            whole = DTensor.from_local(
                rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
            )
            rows = whole.full_tensor()
        return rows.cpu() if self.first else None


class Machine(NamedTuple):
    """The machine of one rank."""

    name: str
    software: dict[str, str]


def machine_here(device: str) -> Machine:
    """Return this machine, as far as results depend on it."""
    return Machine(machine(device), software())


def joined(names: Iterable[str]) -> str:
    """Return one name for what all ranks have: each different one, in order."""
    return "; ".join(sorted(set(names)))


def software() -> dict[str, str]:
    """Return the versions of the libraries that compute an update."""
    return {name: version(name) for name in ("torch", "transformers")}


def machine(device: str) -> str:
    """Return what the order of sums depends on: the card's name, or the processor with the instructions that are used.

    Libraries choose their code by the maker and model of a processor, not by its instructions alone.
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return " ".join((torch.backends.cpu.get_cpu_capability(), platform.machine(), *_processor()))


def _processor() -> list[str]:
    """Return maker, family and model of the processor, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return [platform.processor()]
    values = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return [values[name] for name in ("vendor_id", "cpu family", "model") if name in values]
