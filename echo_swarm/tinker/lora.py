"""LoRA for several models that share one frozen base: y = W x + (α / r) · B A x, with the matrices of the active one.

- The base keeps its modules and names: hooks of its linear layers add what the active adapter has learned.
- Tinker's α is 32 for every rank, so that one learning rate suits all of them.
- B starts at zero, so a new model samples as its base does. A starts at random, from the model's own seed.
- Embeddings and output layer are not adapted: many models share one matrix for both.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from protocol.errors import ConfigInvalid, FieldRefused
from protocol.policy import adapter as published

ALPHA = 32.0

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
MLP = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")
"""Linear layers of the Llama family and of Phi-3, as `learner.lora_targets` has them by default."""


@dataclass(frozen=True, slots=True)
class LoraShape:
    """The choices of a model's creator."""

    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    seed: int = 0

    @property
    def targets(self) -> tuple[str, ...]:
        """Return the names of the layers that are adapted."""
        return (ATTENTION if self.train_attn else ()) + (MLP if self.train_mlp else ())


class LoraMatrices:
    """The trained matrices of one model, by the names of the layers that they adapt."""

    def __init__(self, shape: LoraShape, layers: Mapping[str, nn.Linear]) -> None:
        if not 1 <= shape.rank <= published.RANK_MAX:
            raise FieldRefused(f"lora_config.rank is {shape.rank}.", hint=f"Use a rank from 1 to {published.RANK_MAX}.")
        self.shape = shape
        self.scale = ALPHA / shape.rank
        self.down, self.up = dict[str, nn.Parameter](), dict[str, nn.Parameter]()
        random = torch.Generator().manual_seed(shape.seed)
        for name, layer in layers.items():
            if name.rpartition(".")[2] not in shape.targets:
                continue
            drawn = (2 * torch.rand(shape.rank, layer.in_features, generator=random) - 1) * layer.in_features**-0.5
            self.down[name] = nn.Parameter(drawn.to(layer.weight.device))
            self.up[name] = nn.Parameter(torch.zeros(layer.out_features, shape.rank, device=layer.weight.device))
        if not self.down:
            raise ConfigInvalid(
                "No layer of this model is adapted by train_attn and train_mlp.",
                hint="Set at least one of them; train_unembed alone is not offered.",
            )

    def named(self) -> dict[str, nn.Parameter]:
        """Return all matrices by their names in a saved state."""
        return {f"{kind}.{name}": part for kind in ("down", "up") for name, part in getattr(self, kind).items()}

    def learned(self, name: str) -> torch.Tensor:
        """Return what a layer's weight has gained, in float32."""
        return self.up[name].detach().float() @ self.down[name].detach().float() * self.scale


class SharedBase:
    """A frozen model in which one adapter at a time is active."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._active: LoraMatrices | None = None
        output = model.get_output_embeddings()
        self.layers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and module is not output and name.rpartition(".")[2] in (*ATTENTION, *MLP)
        }
        model.requires_grad_(False)
        for name, layer in self.layers.items():
            layer.register_forward_hook(self._add(name))

    @contextmanager
    def adapted(self, matrices: LoraMatrices) -> Iterator[Any]:
        """Yield the model with this adapter active."""
        self._active = matrices
        try:
            yield self.model
        finally:
            self._active = None

    def write_merged(self, matrices: LoraMatrices, folder: Path) -> None:
        """Write the weights with the adapter merged, in hub format; merged ones in float32, which the client rounds."""
        merged = dict(self.model.state_dict())
        for name in matrices.down:
            weight = merged[f"{name}.weight"]
            merged[f"{name}.weight"] = weight.float() + matrices.learned(name)
        self.model.save_pretrained(folder, state_dict=merged)

    def write_adapter(self, matrices: LoraMatrices, folder: Path) -> None:
        """Write the adapter alone, in peft's format, for a round whose versions are adapters."""
        parts = {
            place: part.detach().cpu().contiguous()
            for name in matrices.down
            for place, part in zip(
                published.names(f"{name}.weight"), (matrices.down[name], matrices.up[name]), strict=True
            )
        }
        folder.mkdir(parents=True, exist_ok=True)
        save_file(parts, folder / published.WEIGHTS, metadata={"format": "pt"})
        modules = {name.rpartition(".")[2] for name in matrices.down}
        (folder / published.CONFIG).write_bytes(published.config(matrices.shape.rank, ALPHA, modules, "base"))

    def _add(self, name: str) -> Any:
        def hook(_: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
            active = self._active
            if active is None or name not in active.down:
                return output
            learned = (inputs[0].float() @ active.down[name].T) @ active.up[name].T
            return output + (learned * active.scale).to(output.dtype)

        return hook
