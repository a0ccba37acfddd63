"""LoRA: small trained matrices beside frozen ones, y = W x + (α / r) · B A x.

- The model keeps its own modules and names: adapters are hooks of its linear layers that add to their outputs.
- B starts at zero, so the policy starts as the base; A starts at random, the same on every rank.
- Matrices are published under the names of the weights in the files of the base, which for some families differ from
  those of transformers' modules.
- A version has the matrices in the policy's own type, beside a base that never changes (`protocol.policy.adapter`); or
  the merged weights, W + (α / r) · B A, which a node loads like any others.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from protocol.errors import ConfigInvalid
from protocol.policy import adapter
from swarm_exact.merging import Rounding, dithered, merged, narrowed

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")
"""The linear layers of the Llama family and of Phi-3, as peft names them: the default of `learner.lora_targets`."""


def stored_names(model: Any, weights: Iterable[str]) -> dict[str, str]:
    """Return the names of weights in the files of a policy, without weights that the files hold in another form.

    One call for all weights: of a model that was not loaded from files, transformers lists all modules in each call.
    """
    shapes = {name: model.get_parameter(name).shape for name in weights}
    parts = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    names = {id(part): name for name, part in parts.items()}  # a part that is only renamed stays the same object
    stored = revert_weight_conversion(model, parts)
    return {names[id(part)]: name for name, part in stored.items() if id(part) in names}


def weights_by_stored_name(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights that may have an adapter, by their names in the files of a policy."""
    stored = stored_names(model, [f"{name}.weight" for name in _linear(model)])
    return {name: model.get_parameter(weight) for weight, name in stored.items()}


def _linear(model: Any) -> list[str]:
    """Return the names of a model's linear layers, except its output."""
    output = model.get_output_embeddings()
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not output]


def _matrices(model: Any) -> int:
    """Return the count of numbers in a model's matrices, except embeddings and output; experts count, norms do not."""
    ends = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    return sum(weight.numel() for weight in model.parameters() if weight.dim() > 1 and id(weight) not in ends)


class Adapters(nn.Module):
    """The adapters of a frozen model."""

    def __init__(
        self,
        model: Any,
        rank: int,
        alpha: float,
        targets: Collection[str] = TARGETS,
        *,
        coverage_min: float = 0.0,
        rounding: Rounding = dithered,
    ) -> None:
        super().__init__()
        self._scale = alpha / rank
        self._silent = False
        targeted = [name for name in _linear(model) if name.rpartition(".")[2] in targets]
        stored = stored_names(model, [f"{name}.weight" for name in targeted])
        self._names = [name for name in targeted if f"{name}.weight" in stored]
        if not self._names:
            raise ConfigInvalid(
                f"Adapters cannot be added to a {model.config.model_type} model: it has no linear layer called "
                f"{', '.join(targets)}.",
                hint="Set learner.lora_targets to names of its layers, or learner.lora_rank=0 to train all weights.",
            )
        self.coverage = sum(model.get_parameter(f"{name}.weight").numel() for name in self._names) / _matrices(model)
        """The share of the numbers in the model's matrices that is in adapted ones."""
        if self.coverage < coverage_min:
            raise self._too_few(model, coverage_min)
        self._stored = [stored[f"{name}.weight"] for name in self._names]
        self._of_weight = {f"{name}.weight": index for index, name in enumerate(self._names)}
        self._rounding = rounding
        model.requires_grad_(False)
        self.down, self.up = nn.ParameterList(), nn.ParameterList()
        random = torch.Generator().manual_seed(0)
        for name in self._names:
            layer = model.get_submodule(name)
            bound = layer.in_features**-0.5
            down = (2 * torch.rand(rank, layer.in_features, generator=random) - 1) * bound
            self.down.append(nn.Parameter(down.to(layer.weight.device)))
            self.up.append(nn.Parameter(torch.zeros(layer.out_features, rank, device=layer.weight.device)))
            layer.register_forward_hook(self._add(len(self.down) - 1))

    def _too_few(self, model: Any, coverage_min: float) -> ConfigInvalid:
        """Return the error for too small a coverage, with the names of other layers that could have adapters."""
        others = {name.rpartition(".")[2] for name in _linear(model)} - {
            name.rpartition(".")[2] for name in self._names
        }
        more = (
            f"Add some of {', '.join(sorted(others))} to learner.lora_targets"
            if others
            else ("Its other matrices, such as experts, are not linear layers: set learner.lora_rank=0")
        )
        return ConfigInvalid(
            f"Adapters would cover {self.coverage:.0%} of the {model.config.model_type} model's matrices, and "
            f"learner.lora_coverage_min requires {coverage_min:.0%}.",
            hint=f"{more}, or lower learner.lora_coverage_min.",
        )

    def rounded(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return the matrices in the published type, by their published names."""
        return {
            name: matrix
            for index, weight in enumerate(self._stored)
            for name, matrix in zip(adapter.names(weight), self._published(index, dtype), strict=True)
        }

    def continue_from(self, published: Mapping[str, torch.Tensor], config: bytes) -> None:
        """Continue from published matrices, which may have another alpha."""
        ratio = adapter.scale(config) / self._scale
        with torch.no_grad():
            for index, weight in enumerate(self._stored):
                down, up = adapter.names(weight)
                self.down[index].copy_(published[down])
                self.up[index].copy_(published[up].float() * ratio)

    def config(self, base: str) -> bytes:
        """Return the published description."""
        rank = len(self.down[0])
        return adapter.config(rank, self._scale * rank, {name.rpartition(".")[2] for name in self._names}, base)

    def merged(self, name: str, rows: torch.Tensor, places: slice) -> torch.Tensor:
        """Return some rows of a weight of the model with its adapter merged."""
        if (index := self._of_weight.get(name)) is None:
            return rows
        down, up = self.down[index].detach(), self.up[index].detach()[places]
        return merged(self._stored[index], rows, down, up, self._scale, places.start or 0, self._rounding)

    def as_nodes_merge(self, name: str, rows: torch.Tensor, places: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows as nodes merge them, from a base and matrices published in `dtype`."""
        rows = rows.to(dtype)
        if (index := self._of_weight.get(name)) is None:
            return rows
        down, up = self._published(index, dtype)
        return merged(self._stored[index], rows, down, up[places], self._scale, places.start or 0, self._rounding)

    def _published(self, index: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and B of a weight in the published type."""
        names = adapter.names(self._stored[index])
        down, up = (
            narrowed(name, part.detach(), dtype, rounding=self._rounding)
            for name, part in zip(names, (self.down[index], self.up[index]), strict=True)
        )
        return down, up

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Turn the adapters off in this block, for weights that have them merged already."""
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
