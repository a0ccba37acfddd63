"""The processes that train one policy together: what they tell each other, and how its weights are shared out.

- One process is the plain case of the same code: it has everything, and there is nobody to tell.
- All ranks make the same calls in the same order. Rank 0 alone talks to the coordinator and to the disk's names.
- Weights, gradients and optimizer states lie in shards, one for each rank (FSDP2); what is small lies everywhere.
- Nobody else in the learner knows `torch.distributed`, but for the format of checkpoints.
- There is no second model or optimizer code: FSDP2 swaps the parameters of the same modules for shards, and AdamW
  steps on those.
- They trust each other: what they tell is pickled. They belong on one machine or into a network of their own.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from types import MethodType
from typing import Any, TypeVar

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
"""For a word of rank 0, which waits for batches as long as there are none. Hung work is the watchdog's to end."""


class Ranks:
    """This process among those that train together."""

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
        """Part from the others, when all is done."""
        if self.size > 1:
            dist.destroy_process_group()

    def broadcast(self, what: Told) -> Told:
        """What rank 0 says; the others' word does not count."""
        if self.size == 1:
            return what
        box = [what]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def meet(self) -> None:
        """Wait for everybody."""
        self.total(torch.zeros(1))

    def total(self, table: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(table)
        return table

    def deal(self, pieces: Iterable[Told]) -> Iterator[tuple[Told, bool]]:
        """This rank's share, and whether each piece is really its own.

        Everybody gets as many: weights are gathered by all or by none. What is too much is computed for nothing.
        """
        found = list(pieces)
        for start in range(0, len(found), self.size):
            self.watchdog.moved()
            place = start + self.rank
            yield (found[place], True) if place < len(found) else (found[start], False)

    def shard(self, model: Any) -> None:
        """Leave of every weight only this rank's rows here; each layer gathers its own when it is computed."""
        if self._mesh is None:
            return
        for layer in model.get_decoder().layers:
            fully_shard(layer, mesh=self._mesh)
        # Else the root's weights would stay gathered after a pass without gradient, and the next update go unseen.
        fully_shard(model, mesh=self._mesh, reshard_after_forward=True)

    def forward(self, model: Any, function: Callable[..., Any]) -> None:
        """Make a function of a model its method, for which sharded weights are gathered as for its own forward pass."""
        setattr(model, function.__name__, MethodType(function, model))
        register_fsdp_forward_method(model, function.__name__)

    def join_gradients(self, weights: Sequence[torch.Tensor]) -> None:
        """Average the gradients of weights that lie everywhere, as FSDP has done with those in shards."""
        for weight in weights:
            if self.size > 1 and weight.grad is not None and not isinstance(weight, DTensor):
                self.total(weight.grad.div_(self.size))

    def clip(self, weights: Sequence[torch.Tensor], longest: float) -> float:
        """Cut the whole gradient to a length; what it was."""
        norm = torch.nn.utils.clip_grad_norm_(weights, longest)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a tensor, in its own memory."""
        found: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return found.detach()

    def rows(self, tensor: torch.Tensor) -> slice:
        """Which rows of the whole these are."""
        if not isinstance(tensor, DTensor):
            return slice(0, len(tensor))
        each = -(-len(tensor) // self.size)
        return slice(min(self.rank * each, len(tensor)), min((self.rank + 1) * each, len(tensor)))

    def gather(self, rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
        """The whole of what each rank has some rows of, as it has of `like`: in rank 0's memory alone."""
        self.watchdog.moved()
        if isinstance(like, DTensor):
            whole = DTensor.from_local(
                rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
            )
            rows = whole.full_tensor()
        return rows.cpu() if self.first else None
