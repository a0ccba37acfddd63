"""AdamW with moments in half the memory, or in the memory of the host.

- Moments in bfloat16 are rounded up or down at random, in proportion to the distance: the mean error is 0.
  With rounding to the nearest, a moment whose change is less than half a step of bfloat16 would never change.
- The random numbers depend on the seed and the number of the step: a resumed learner makes the same steps, bit for bit.
- A weight is changed in parts: moments on the host are copied to the card for one part at a time, and back.
- The arithmetic is that of `torch.optim.AdamW`, in float32, except for the order of some products.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from coordinator.learner.settings import TrainSettings
from protocol.errors import ConfigInvalid

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The two moments that AdamW keeps of each weight."""

PART = 2**24
"""The numbers of a weight that are changed at a time; meanwhile five float32 copies of them, 320 MiB, are held."""

COPIES_BYTES = 5 * 4 * PART
"""Bytes of both moments, the root, the noise, and the rounded numbers."""


def make_optimizer(model: Any, trained: dict[str, torch.Tensor], settings: TrainSettings) -> torch.optim.Optimizer:
    """Return torch's own AdamW for the trained weights, or `SmallAdamW` if the settings ask for it."""
    weights = _decay_groups(model, trained, settings)
    common: dict[str, Any] = {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.eps}
    if settings.optimizer_dtype == "float32" and not settings.optimizer_offload:
        return torch.optim.AdamW(weights, **common, fused=True)
    weights, dtype = list(weights), getattr(torch, settings.optimizer_dtype)
    if any(isinstance(weight, DTensor) for weight in weights):
        raise ConfigInvalid(
            "learner.optimizer_dtype and learner.optimizer_offload need learner.processes = 1.",
            hint="Remove both: several ranks already share the moments among themselves.",
        )
    return SmallAdamW(weights, **common, dtype=dtype, on_host=settings.optimizer_offload, seed=settings.seed)


def _decay_groups(model: Any, trained: dict[str, torch.Tensor], settings: TrainSettings) -> list[dict[str, Any]]:
    """Split the weights into those that decay and those that do not."""
    embeddings = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Embedding)}
    decays, stays = list[torch.Tensor](), list[torch.Tensor]()
    for name, weight in trained.items():
        is_matrix = weight.dim() > 1 and name not in embeddings
        (decays if is_matrix or settings.decayed == "all" else stays).append(weight)
    groups = ((decays, settings.weight_decay), (stays, 0.0))
    return [{"params": weights, "weight_decay": decay} for weights, decay in groups if weights]


def before_first_step(optimizer: torch.optim.Optimizer, weight: torch.Tensor, steps: int) -> dict[str, torch.Tensor]:
    """Return the optimizer state of a weight, to be filled from a checkpoint."""
    small = optimizer if isinstance(optimizer, SmallAdamW) else None
    moments = {name: small.moment(weight) if small else torch.zeros_like(weight) for name in MOMENTS}
    return {"step": torch.tensor(float(steps), device="cpu" if small else weight.device), **moments}


def rounded(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a float32 tensor in bfloat16, each number rounded up with a chance that grows with its nearness."""
    noise = torch.randint(0, 2**16, value.shape, dtype=torch.int32, device=value.device, generator=generator)
    bits = value.view(torch.int32).add(noise).bitwise_and_(-(2**16))
    return torch.where(value.isfinite(), bits.view(torch.float32), value).to(torch.bfloat16)


class SmallAdamW(torch.optim.Optimizer):
    """AdamW with its moments in another type, or on another device."""

    def __init__(
        self,
        weights: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        dtype: torch.dtype,
        on_host: bool,
        seed: int,
    ) -> None:
        super().__init__(weights, {"lr": lr, "betas": betas, "eps": eps})
        self._dtype, self._on_host, self._seed = dtype, on_host, seed

    def moment(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a moment of a weight before its first step, in the memory where moments are kept."""
        device = torch.device("cpu") if self._on_host else weight.device
        return torch.zeros_like(weight, dtype=self._dtype, device=device)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no loss is computed again
        """Change every weight that has a gradient."""
        number = 0
        for group in self.param_groups:
            for weight in group["params"]:
                number += 1
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state |= {name: self.moment(weight) for name in MOMENTS}
                state["step"] += 1
                self._change(weight, state, group, number)

    def _change(self, weight: torch.Tensor, state: dict[str, Any], group: dict[str, Any], number: int) -> None:
        values, gradient = _flat(weight), _flat(weight.grad)
        mean, square = (_flat(state[name]) for name in MOMENTS)
        step = int(state["step"])
        generator = torch.Generator(values.device).manual_seed((self._seed << 44 ^ step << 20 ^ number) % 2**63)
        for start in range(0, len(values), PART):
            part = slice(start, start + PART)
            moved = (mean[part].to(values.device, torch.float32), square[part].to(values.device, torch.float32))
            _adam(values[part], gradient[part], *moved, step=step, group=group)
            for moment, new in zip((mean[part], square[part]), moved, strict=True):
                if moment.data_ptr() != new.data_ptr():
                    moment.copy_(new if moment.dtype == torch.float32 else rounded(new, generator))


def _adam(
    values: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    *,
    step: int,
    group: dict[str, Any],
) -> None:
    """Change values and moments in place."""
    slow, slower = group["betas"]
    values.mul_(1 - group["lr"] * group["weight_decay"])
    mean.lerp_(gradient, 1 - slow)
    square.mul_(slower).addcmul_(gradient, gradient, value=1 - slower)
    root = square.sqrt().div_((1 - slower**step) ** 0.5).add_(group["eps"])
    values.addcdiv_(mean, root, value=-group["lr"] / (1 - slow**step))


def _flat(tensor: Any) -> torch.Tensor:
    """Return a tensor in one dimension; a contiguous one shares its memory."""
    flat: torch.Tensor = tensor.detach().reshape(-1)
    return flat
