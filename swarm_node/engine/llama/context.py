"""Array interface to llama.cpp's context: rows of tokens in, logits of the last tokens out.

- Each row is a sequence with its own part of the cache (`kv_unified` off), which is 2.4 times as fast for many rows as
  a shared cache. So a context has a fixed number of rows and a fixed width, and copying a row copies its whole part.
- float32 also computes attention in float32, and differs from torch no more than torch from itself. The other types use
  flash attention with a cache in half precision, which is much faster.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from swarm_node.engine.llama.ggml import Type
from swarm_node.engine.llama.model import LlamaModel

BATCH_TOKENS = 2048
"""Tokens passed to llama.cpp at once; longer prompts are split."""

WIDTH_STEP = 256
"""llama.cpp rounds the width of a row up to a multiple of this."""

DECODED, OUT_OF_MEMORY = 0, -2
"""Some return values of `llama_decode`."""

_FIELDS: dict[str, Any] = {field[0]: field[1] for field in llama_cpp.llama_batch._fields_}

Ints = NDArray[np.integer]


class LlamaContext:
    """A llama.cpp context with a cache for `rows` rows of `width` tokens."""

    def __init__(self, model: LlamaModel, *, exact: bool, rows: int, width: int, threads: int) -> None:
        parameters = llama_cpp.llama_context_default_params()
        width = -(-width // WIDTH_STEP) * WIDTH_STEP
        parameters.n_ctx = rows * width
        parameters.n_seq_max = parameters.n_outputs_max = rows
        parameters.n_batch = max(BATCH_TOKENS, rows)
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.kv_unified = False
        parameters.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED if exact else llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        )
        parameters.type_k = parameters.type_v = Type.F32 if exact else Type.F16
        self.pointer = llama_cpp.llama_init_from_model(model.pointer, parameters)
        if not self.pointer:
            raise MemoryError(f"llama.cpp makes no context for {rows} rows of {width} tokens")
        weakref.finalize(self, llama_cpp.llama_free, self.pointer)
        self._model = model  # must outlive the context
        self._memory = llama_cpp.llama_get_memory(self.pointer)
        self._vocabulary = model.vocabulary
        self.rows, self.width = rows, width

    def step(self, tokens: Ints, positions: Ints, rows: Ints) -> NDArray[np.float32]:
        """Append tokens, grouped by row; return the logits after the last token of each row, until the next step."""
        last = np.append(rows[1:] != rows[:-1], True)
        parts = [slice(first, first + BATCH_TOKENS) for first in range(0, len(tokens), BATCH_TOKENS)]
        if len(parts) == 1:
            return self._decode(tokens, positions, rows, last)
        return np.concatenate(
            [self._decode(tokens[part], positions[part], rows[part], last[part]).copy() for part in parts]
        )

    def copy(self, source: int, targets: Iterable[int]) -> None:
        """Copy the row `source` to `targets`."""
        for target in targets:
            if target != source:
                llama_cpp.llama_memory_seq_cp(self._memory, source, target, -1, -1)

    def remove(self, row: int) -> None:
        """Forget a row."""
        llama_cpp.llama_memory_seq_rm(self._memory, row, -1, -1)

    def clear(self) -> None:
        """Forget all rows."""
        llama_cpp.llama_memory_clear(self._memory, False)

    def _decode(self, tokens: Ints, positions: Ints, rows: Ints, wanted: Ints) -> NDArray[np.float32]:
        """Decode one batch; return the logits [n, V] of the tokens with a `wanted` flag, in llama.cpp's own memory."""
        count = len(tokens)
        tokens, positions, rows = (np.ascontiguousarray(values, np.int32) for values in (tokens, positions, rows))
        ones, flags = np.ones(count, np.int32), np.ascontiguousarray(wanted, np.int8)
        # A token may belong to several rows, so llama.cpp expects a pointer to the rows of each.
        pointers = rows.ctypes.data + rows.itemsize * np.arange(count, dtype=np.uintp)
        batch: Any = llama_cpp.llama_batch()
        batch.n_tokens = count
        for name, values in (("token", tokens), ("pos", positions), ("n_seq_id", ones), ("logits", flags)):
            setattr(batch, name, values.ctypes.data_as(_FIELDS[name]))
        batch.seq_id = pointers.ctypes.data_as(_FIELDS["seq_id"])
        result = llama_cpp.llama_decode(self.pointer, batch)
        if result == OUT_OF_MEMORY:
            raise MemoryError
        if result != DECODED:
            raise RuntimeError(f"llama.cpp answers {result} to {count} tokens")
        if not (outputs := int(flags.sum())):
            return np.empty((0, self._vocabulary), np.float32)
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self.pointer), (outputs, self._vocabulary))
