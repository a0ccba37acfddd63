"""LoRA: small matrices beside frozen ones, y = W x + (α / r) · B A x, that alone are trained.

- The model keeps its own modules and names: adapters listen at its linear layers and add to what they give.
- B starts at zero, so the policy starts as the base; A starts at random, by the seed.
- What is published are merged weights, W + (α / r) · B A: a node loads them like any others.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of the Llama family, as peft names them."""


class Adapters(nn.Module):
    """The adapters of one model, which is frozen."""

    def __init__(self, model: Any, rank: int, alpha: float) -> None:
        super().__init__()
        self._scale = alpha / rank
        self._silent = False
        self._names = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and name.rpartition(".")[2] in TARGETS
        ]
        if not self._names:
            raise ValueError(f"the model has no linear layer called {', '.join(TARGETS)}")
        model.requires_grad_(False)
        self.down, self.up = nn.ParameterList(), nn.ParameterList()
        random = torch.Generator().manual_seed(0)
        for name in self._names:
            layer = model.get_submodule(name)
            bound = layer.in_features**-0.5
            down = (2 * torch.rand(rank, layer.in_features, generator=random) - 1) * bound
            self.down.append(nn.Parameter(down.to(layer.weight.device)))
            self.up.append(nn.Parameter(layer.weight.new_zeros(layer.out_features, rank)))
            layer.register_forward_hook(self._add(len(self.down) - 1))

    def merged(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The weights of the model with what was learned added to them."""
        learned = {
            f"{name}.weight": (up @ down).detach() * self._scale
            for name, down, up in zip(self._names, self.down, self.up, strict=True)
        }
        return {name: tensor + learned[name] if name in learned else tensor for name, tensor in state.items()}

    @contextmanager
    def silent(self) -> Iterator[None]:
        """The model as its own weights are: for weights that have what was learned in them."""
        self._silent = True
        try:
            yield
        finally:
            self._silent = False

    def _add(self, index: int) -> Any:
        def hook(_: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
            if self._silent:
                return output
            learned: torch.Tensor = (inputs[0] @ self.down[index].T) @ self.up[index].T
            return output + learned * self._scale

        return hook
