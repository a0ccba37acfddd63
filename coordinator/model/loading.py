"""Loading a model from a policy folder, with the memory of this rank's share only.

    laid out on the meta device → types and shards → filled with this rank's rows of every tensor in the files

- transformers fills a model whose weights are already in shards: it reads only the rows of each, and no rank ever holds
  the whole. It calls a method of the model's class to lay the model out, so `load_model` makes a class with it.
- Weights in training are float32. Matrices that are not trained (the base of adapters, the reference policy) keep the
  type in which they were published, and are widened one at a time while they are used: the numbers are the same, in
  half the memory.
"""

import ctypes
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from protocol.errors import ConfigInvalid

LAYERS_AT_ONCE = 8
"""The layers that are computed before freed memory is returned; memory that is returned and used again costs time."""


def class_of(config: Any, name: str) -> tuple[Any, Any]:
    """Return transformers' class for the text model of a configuration, and the text configuration."""
    try:
        plain: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError as error:
        raise ConfigInvalid(f"{name} has a {config.model_type} model, which cannot generate text.") from error
    if plain.config_class == config.sub_configs.get("text_config"):
        config = config.get_text_config()
    return plain, config


def load_model(folder: Path, lay_out: Callable[[Any], None]) -> Any:
    """Return the model of a folder in float32; `lay_out` can change types and shards before numbers are loaded."""
    described = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    plain, config = class_of(described, str(folder))

    def maybe_distribute_model(_: Any, model: Any, *__: Any) -> Any:
        lay_out(model)
        return model

    # The class keeps its name, which is published as the architecture, and its module: both tell transformers how
    # the files of an architecture name their weights, and which buffers it must compute.
    members = {"__module__": plain.__module__, "maybe_distribute_model": classmethod(maybe_distribute_model)}
    ours: Any = type(plain.__name__, (plain,), members)
    model, loading_info = ours.from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        local_files_only=True,
        distributed_config=DistributedConfig(),
        output_loading_info=True,
    )
    if missing := sorted(loading_info["missing_keys"]):  # transformers fills in random numbers
        raise ConfigInvalid(
            f"The weights in {folder} are not complete: {missing[0]} is missing, one of {len(missing)}.",
            hint="Copy or convert the policy again.",
        )
    del model.config.distributed_config  # it would be published
    return model


def keep_as_published(model: Any, dtype: torch.dtype) -> None:
    """Keep the matrices of a laid-out model in this type, and compute as if they were float32."""
    narrow: dict[nn.Parameter, nn.Parameter] = {}
    model.requires_grad_(False)
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = partial(_linear, module)  # type: ignore[method-assign]  # of this one alone
        elif type(module) is nn.Embedding:
            module.forward = partial(_embedding, module)  # type: ignore[method-assign]  # of this one alone
        else:
            continue
        weight = module.weight
        if weight not in narrow:  # otherwise it is tied to an earlier weight
            narrow[weight] = nn.Parameter(weight.detach().to(dtype), requires_grad=False)
        module.weight = narrow[weight]


def _linear(module: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    if torch.is_autocast_enabled(inputs.device.type) or inputs.dtype == module.weight.dtype:
        return linear(inputs, module.weight, module.bias)
    outputs: torch.Tensor = _Widened.apply(  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        inputs, module.weight, module.bias
    )
    return outputs


def _embedding(module: nn.Embedding, tokens: torch.Tensor) -> torch.Tensor:
    return nn.Embedding.forward(module, tokens).float()


class _Widened(torch.autograd.Function):
    """A linear layer whose weight has no gradient, and is saved for the backward pass in its narrow type."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return linear(inputs, weight.to(inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return gradient @ weight.to(gradient.dtype), None, None


def return_freed_memory_while_computing(model: Any) -> None:
    """Return freed memory to the system now, and in each pass before some of the layers.

    Between blocks in use, the C library keeps freed ones: after a forward pass of SmolLM2-135M, 350 MiB. Of backward
    passes, those that compute layers twice return them.
    """
    device = model.device
    return_freed_memory(device)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers[::LAYERS_AT_ONCE]:
        part = next(layer.children())  # a layer's own hooks are not called when it is computed again
        part.register_forward_pre_hook(lambda *_: return_freed_memory(device))


def return_freed_memory(device: torch.device) -> None:
    """Return the process's freed memory to the system, for a model on the CPU and where the C library is glibc."""
    if device.type == "cpu" and sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)
