"""A policy without numbers, to measure the memory that computing with it would need.

    configuration → model of fake tensors → the learner's own code computes with it → bytes of live tensors

- A fake tensor has a type, a shape and a storage of known size, but no memory: a model of 32 billion parameters is made
  in seconds. Shapes are those of the CPU's kernels.
- The real code runs: `forward` and `publication` compute with the fake model, and a dispatch mode counts storages as
  they are made and freed. Temporary memory inside a kernel is not counted.
- Numbers cannot be read, so no result depends on one: the learner itself must check that packing is right for a model.
"""

import copy
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers.initialization import no_init_weights

from coordinator.learner.publication import computing_as_published, scores
from coordinator.learner.settings import TrainSettings
from coordinator.model.batch import Tensors
from coordinator.model.forward import (
    CHECKED_PROMPTS,
    CHECKED_WITH,
    alone,
    checked_batch,
    completion_logprobs,
    compute_layers_twice,
    describes_all,
)
from coordinator.model.loading import class_of, keep_as_published
from coordinator.model.lora import TARGETS, Adapters
from coordinator.model.packing import IMPLEMENTATION, imitating_card
from coordinator.model.products import Products
from protocol.policy import canary

MEASURED_LAYERS = (2, 1)
"""The layers that are measured if all are alike: the difference is the memory of one. With 6 and 3 layers it is the
same to the byte, and takes three times as long to measure."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    """A dispatch mode that counts the bytes of storages made while it is active, fake or real."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self._known = WeakIdKeyDictionary({tensor.untyped_storage(): True for tensor in known})
        self._live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()) not in self._known:
                self._known[storage] = True
                self._live += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self._live)
        return made

    def _free(self, count: int) -> None:
        self._live -= count


class SimulatedModel:
    """A model of fake tensors, whose layers can be cut to a few."""

    def __init__(self, described: Any, *, narrow: bool) -> None:
        """Lay out the model in float32; with `narrow`, its matrices keep the type in which they are published."""
        self._published: torch.dtype = described.dtype or torch.float32
        plain, config = class_of(copy.deepcopy(described), "The configuration")
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        with self._fake:
            with no_init_weights():  # which draws numbers, and ties weights
                self.model: Any = plain._from_config(config, dtype=torch.float32)
            self.model.tie_weights()
            if narrow:
                keep_as_published(self.model, self._published)
        self.layers: Any = self.model.get_decoder().layers
        self.parameters = int(self.model.num_parameters())
        self.weights_bytes: int = sum(weight.nbytes for weight in self.model.parameters())
        self.layer_bytes: list[int] = [sum(weight.nbytes for weight in layer.parameters()) for layer in self.layers]
        self.model.eval()
        self._text = self.model.config.get_text_config()
        self.is_uniform = self._layers_are_alike()
        self._all_layers = self.layers

    @cached_property
    def self_check(self) -> int:
        """Return the peak of a comparison of packing with each sample alone; it chooses packing if that works."""
        if self.is_uniform:
            self.cut(MEASURED_LAYERS[1])
        return self._choose_attention()

    @property
    def trained(self) -> list[torch.Tensor]:
        """Return the weights that an optimizer changes: none, unless the model is a learner's."""
        return []

    def _choose_attention(self) -> int:
        """Choose packing if the model supports it; return the peak of the test."""
        usual = self.model.config._attn_implementation
        try:
            self.model.set_attn_implementation(IMPLEMENTATION)
            peak = self._compared()
            if describes_all(self.model):
                return peak
        except Exception:  # models fail in many ways on inputs that they do not support
            pass
        self.model.set_attn_implementation(usual)
        return self._compared()

    def _layers_are_alike(self) -> bool:
        """Return True if all layers are alike, so that some layers are enough to measure."""
        kinds = {
            (type(layer), getattr(layer, "attention_type", None), tuple(weight.shape for weight in layer.parameters()))
            for layer in self.layers
        }
        return len(kinds) == 1

    def cut(self, count: int) -> None:
        """Reduce the model to its first `count` layers."""
        self.layers = self._all_layers[:count]
        self.model.get_decoder().layers = self.layers
        self._text.num_hidden_layers = len(self.layers)

    def _compared(self) -> int:
        """Compute the longest sample alone, and all at once, in float32 for any `dtype` setting."""
        data = checked_batch(self._text.vocab_size)
        longest = int((data.lengths + torch.tensor(CHECKED_PROMPTS)[data.owners]).argmax())

        def work() -> None:
            with torch.no_grad():
                alone(self.model, data, longest)
                self._said(data, CHECKED_WITH)

        return self._peak(work)

    def _said(self, data: Tensors, products: Products) -> tuple[torch.Tensor, torch.Tensor]:
        return completion_logprobs(self.model, data, torch.arange(len(data.mask)), products)

    def _peak(self, work: Callable[[], object], *, on_card: bool = False) -> int:
        """Return the peak of `work`, in bytes above those of weights, adapters and gradients."""
        held = [*self.model.parameters(), *self.model.buffers(), *self.trained]
        held += [weight.grad for weight in self.trained if weight.grad is not None]
        live = LiveBytes(held)
        with imitating_card() if on_card else nullcontext(), live:
            work()
        return live.peak


class SimulatedPolicy(SimulatedModel):
    """A model of fake tensors in the layout of `TrainedPolicy`."""

    def __init__(self, described: Any, settings: TrainSettings) -> None:
        """Lay out the model and the adapters of `settings`; the other settings have no effect."""
        super().__init__(described, narrow=bool(settings.lora_rank))
        with self._fake:
            self.adapters = (
                Adapters(self.model, settings.lora_rank, settings.lora_alpha, settings.lora_targets or TARGETS)
                if settings.lora_rank
                else None
            )
        self.trained_bytes: int = sum(weight.nbytes for weight in self.trained)
        self.self_check  # noqa: B018  # chooses the attention with which all else is measured

    @property
    def trained(self) -> list[torch.Tensor]:
        """Return the weights that the optimizer changes."""
        return list((self.adapters or self.model).parameters())

    def learned(self, data: Tensors, settings: TrainSettings) -> int:
        """Return the peak of computing a piece forward and backward, beside the gradients of an earlier one."""
        if settings.gradient_checkpointing:
            compute_layers_twice(self.model)
        reached = [weight for weight in self.trained if weight.grad is None]
        for weight in reached:
            weight.grad = torch.empty_like(weight)

        def work() -> None:
            logprobs, entropy = self._said(data, settings.products)
            loss = logprobs + entropy if settings.algorithm.entropy_bonus else logprobs
            loss.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated

        try:
            return self._peak(work, on_card=settings.device != "cpu")
        finally:
            # Layers are computed twice in training mode only, which requests a gradient of the embeddings.
            self.model.eval()
            self.model.disable_input_require_grads()

    def published(self, *, merged: bool) -> int:
        """Return the peak of writing the largest weight, with its adapter if `merged`."""
        whole = slice(None)

        def made(name: str, weight: torch.Tensor) -> torch.Tensor:
            rows = self.adapters.merged(name, weight, whole) if self.adapters and merged else weight
            return rows.to(self._published)

        weights = [(name, weight.detach()) for name, weight in self.model.named_parameters()]
        return max(self._peak(lambda name=name, weight=weight: made(name, weight)) for name, weight in weights)  # type: ignore[misc]  # of mypy: defaults of a lambda

    @cached_property
    def canary(self) -> int:
        """Return the peak of scoring the canary's text with the published weights."""

        def made(name: str, rows: torch.Tensor, places: slice) -> torch.Tensor:
            if self.adapters:
                return self.adapters.as_nodes_merge(name, rows, places, self._published)
            return rows.to(self._published)

        tokens = torch.arange(min(canary.TOKENS, getattr(self._text, "max_position_embeddings", canary.TOKENS)))

        def work() -> None:
            silent = self.adapters.silent() if self.adapters else nullcontext()
            with silent, computing_as_published(self.model, made):
                for dtype in (None, torch.bfloat16, torch.float16):
                    scores(self.model, tokens, dtype)

        return self._peak(work)
