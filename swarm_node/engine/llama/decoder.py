"""`Decoder` on llama.cpp: rows share their prompt's computation, in a context that grows on demand.

- llama.cpp computes only adjacent rows together. Hence prompts are computed in the first of the new rows and copied
  from there, and rows move up when others are removed.
- When the context is too small, the existing rows are computed again in a larger one: llama.cpp cannot move rows
  between contexts of different sizes. This happens a few times in a node's life, since a context is kept.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from swarm_node.engine.llama.context import LlamaContext
from swarm_node.engine.llama.ggml import Type
from swarm_node.engine.llama.model import LlamaModel
from swarm_node.engine.llama.sampler import NumpyLogits

_SHORT = {Type.F32: "fp32", Type.F16: "fp16", Type.BF16: "bf16", Type.Q8_0: "q8_0"}


class LlamaDecoder:
    """`Decoder` of one policy folder."""

    joins_midway = True

    def __init__(self, folder: Path, config: dict[str, Any], kind: Type, *, threads: int, gpu_layers: int) -> None:
        self._model = LlamaModel(folder, config, kind, gpu_layers)
        self._kind, self._threads = kind, threads
        self.vocab_size, self.positions_max = self._model.vocabulary, self._model.positions
        self.parameters = self._model.parameters
        device = "gpu" if gpu_layers and llama_cpp.llama_supports_gpu_offload() else "cpu"
        short = "fp16" if kind == Type.F32 and not self._model.is_exact else _SHORT[kind]
        self.numerics = f"llama/{short}/{device}"
        self._context: LlamaContext | None = None
        self._rows: list[list[int]] = []
        """The tokens of each row."""

    def swap(self, folder: Path) -> bool:
        return self._model.swap(folder)

    def prefill(self, prompts: Sequence[Sequence[int]], copies: Sequence[int]) -> NumpyLogits:
        first, last = len(self._rows), len(self._rows) + sum(copies)
        context = self._room(last, max(map(len, prompts)))
        logits = _append(context, prompts, first)
        start = last
        for number in reversed(range(len(prompts))):  # from the last on: its copies are after the earlier prompts
            start -= copies[number]
            context.copy(first + number, range(start, start + copies[number]))
        self._rows += [list(prompt) for prompt, count in zip(prompts, copies, strict=True) for _ in range(count)]
        return NumpyLogits(np.repeat(logits, copies, axis=0))

    def decode(self, tokens: Sequence[int]) -> NumpyLogits:
        lengths = [len(row) for row in self._rows]
        logits = self._room(len(tokens), max(lengths) + 1).step(
            np.array(tokens), np.array(lengths), np.arange(len(tokens))
        )
        for row, token in zip(self._rows, tokens, strict=True):
            row.append(token)
        return NumpyLogits(logits)

    def move(self, sources: Sequence[int], targets: Sequence[int], rows: int) -> None:
        assert self._context is not None
        for source, target in zip(sources, targets, strict=True):
            self._context.copy(source, [target])
            self._rows[target] = self._rows[source]
        for row in range(rows, len(self._rows)):
            self._context.remove(row)
        del self._rows[rows:]

    def clear(self) -> None:
        self._rows = []
        if self._context is not None:
            self._context.clear()

    def _room(self, rows: int, width: int) -> LlamaContext:
        """Return a context for at least `rows` rows of `width` tokens, with the existing rows."""
        old = self._context
        if old is not None and rows <= old.rows and width <= old.width:
            return old
        generous = (1 << (rows - 1).bit_length(), width)
        if old is not None:
            rows, width = max(rows, old.rows), max(width, old.width)
            generous = (max(generous[0], old.rows), width if width == old.width else max(width, old.width * 3 // 2))
        self._context = old = None  # before the next is created: two may not fit
        try:
            context = self._open(*generous)
        except MemoryError:
            context = self._open(rows, width)
        if self._rows:
            _append(context, self._rows, 0)
        self._context = context
        return context

    def _open(self, rows: int, width: int) -> LlamaContext:
        exact = self._kind == Type.F32
        return LlamaContext(self._model, exact=exact, rows=rows, width=width, threads=self._threads)


def _append(context: LlamaContext, texts: Sequence[Sequence[int]], first: int) -> NDArray[np.float32]:
    """Compute texts in new rows, starting at row `first`."""
    return context.step(
        np.concatenate([np.array(text) for text in texts]),
        np.concatenate([np.arange(len(text)) for text in texts]),
        np.repeat(np.arange(first, first + len(texts)), [len(text) for text in texts]),
    )
