"""The engine on llama.cpp: for consumer graphics cards, Apple and CPUs; supports the architectures of `recipes`.

- It does not need torch.
- The precision is that of the weights: float32, float16, bfloat16, or q8_0 (8 bits with a scale for every 32 weights).
"""

from pathlib import Path
from typing import Any

from swarm_node.engine.decoder import Decoder
from swarm_node.engine.engine import Engine
from swarm_node.engine.llama.decoder import LlamaDecoder
from swarm_node.engine.llama.ggml import Type
from swarm_node.engine.turn_cache import SIZE_MAX_BYTES

SLOTS = 256
"""llama.cpp's maximum of sequences."""

TYPES = {"float32": Type.F32, "float16": Type.F16, "bfloat16": Type.BF16, "q8_0": Type.Q8_0}
DEFAULT_DTYPE = "float32"
"""Accepted by every round's tolerances; the others are faster or smaller, for rounds that admit their class."""

ALL_LAYERS = -1


class LlamaEngine(Engine):
    """Engine that samples with llama.cpp."""

    def __init__(
        self,
        *,
        dtype: str = "auto",
        threads: int = 1,
        gpu_layers: int = ALL_LAYERS,
        slots: int = SLOTS,
        turns_max_bytes: int = SIZE_MAX_BYTES,
    ) -> None:
        super().__init__(slots, turns_max_bytes=turns_max_bytes)
        self._kind = TYPES[DEFAULT_DTYPE if dtype == "auto" else dtype]
        self._threads, self._gpu_layers = threads, gpu_layers

    def _build(self, folder: Path, config: dict[str, Any]) -> Decoder:
        return LlamaDecoder(folder, config, self._kind, threads=self._threads, gpu_layers=self._gpu_layers)
