"""The engine on torch: our own Qwen3, Qwen2 and Llama, and all other models of transformers.

It computes on the CPU, with CUDA, or with what torch calls xpu (Intel) and mps (Apple). torch calls ROCm (AMD) cuda.
"""

import logging
import os
from pathlib import Path
from typing import Any

import torch

from protocol.errors import EngineFailed
from protocol.policy import model_config
from protocol.work.lease import EXACT
from swarm_exact import cards
from swarm_exact import shape as model_shape
from swarm_node.engine.decoder import Decoder
from swarm_node.engine.engine import Answered, Engine
from swarm_node.engine.turn_cache import SIZE_MAX_BYTES

log = logging.getLogger(__name__)

CARD_FAILED: Any = getattr(torch, "AcceleratorError", ())
"""The error of a card's driver, such as an illegal access or a card that fell off the bus; torch has it since 2.8."""

NO_MEMORY = (
    "allocate memory",
    "bad_alloc",
    "CUDA error: out of memory",
    "HIP error: out of memory",
    "_STATUS_ALLOC_FAILED",
)
"""Parts of messages of failed allocations: of the processor, of a card's driver, and of its libraries."""

SLOTS = 512
"""Samples decoded at once; a step costs little more for many rows than for one, as long as memory suffices."""


def default_device() -> str:
    """Return the device that this build of torch finds on this machine."""
    if torch.cuda.is_available():  # also AMD's cards, in a build for ROCm
        return "cuda"
    if torch.xpu.is_available():
        return "xpu"
    return "mps" if torch.backends.mps.is_available() else "cpu"


class TorchEngine(Engine):
    """Engine that samples with torch."""

    compares_swaps = True

    def __init__(
        self, *, device: str = "auto", dtype: str = "auto", slots: int = SLOTS, turns_max_bytes: int = SIZE_MAX_BYTES
    ) -> None:
        super().__init__(slots, turns_max_bytes=turns_max_bytes)
        self._device = torch.device(default_device() if device == "auto" else device)
        self._dtype = dtype
        cards.compute_in_full(self._device)

    load = torch.inference_mode()(Engine.load)
    cancel = torch.inference_mode()(Engine.cancel)

    @torch.inference_mode()
    def step(self) -> list[Answered]:
        """Take a step; end the process if the card failed, since every later operation of this process would fail."""
        try:
            return super().step()
        except CARD_FAILED:
            log.exception("the graphics card failed in a step")
            os._exit(1)

    def is_out_of_memory(self, error: Exception) -> bool:
        """Return True for a failed allocation; only PyTorch's own allocator for cards has an error type for it."""
        named = isinstance(error, MemoryError | torch.OutOfMemoryError)
        return named or any(words in str(error) for words in NO_MEMORY)

    def _build(self, folder: Path, config: dict[str, Any]) -> Decoder:
        """Return our own decoder if it supports the architecture, otherwise that of `transformers`."""
        if reason := model_config.reason_to_refuse(config):
            raise EngineFailed(
                f"The torch engine cannot sample the policy in {folder}: {reason}.",
                hint="docs/architectures.md lists the architectures that work.",
            )
        dtype = self._dtype
        if dtype == EXACT:
            return self._build_exact(folder, config)
        if reason := cards.reason_to_refuse(self._device):
            raise EngineFailed(
                f"torch cannot compute on the graphics card: {reason.rstrip('.')}.",
                hint="Install the driver and the build of torch for this card, or add `--device cpu`.",
            )
        if dtype == "auto":
            published = config.get("dtype") or config.get("torch_dtype") or "float32"
            dtype = "float32" if self._device.type == "cpu" else published
        precision = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.get(dtype)
        if precision is None:
            raise ValueError(f"dtype {dtype} is neither float32 nor bfloat16 nor float16 nor exact")
        if model_shape.supports(config):
            from swarm_node.engine.torch.qwen3 import Qwen3

            return Qwen3(folder, config, self._device, precision)
        from swarm_node.engine.torch.generic import Generic  # its import of transformers takes seconds

        return Generic(folder, self._device, precision)

    def _build_exact(self, folder: Path, config: dict[str, Any]) -> Decoder:
        if self._device.type != "cpu":
            raise EngineFailed(
                f"Exact sampling runs on the CPU only, not on {self._device.type}.", hint="Add `--device cpu`."
            )
        if not model_shape.supports(config):
            raise EngineFailed(
                f"The policy in {folder} cannot be sampled exactly: only Qwen3, Qwen2 and Llama can.",
                hint="Choose another `--dtype`.",
            )
        from swarm_node.engine.torch.exact import ExactDecoder

        return ExactDecoder(folder, config, self._device)
