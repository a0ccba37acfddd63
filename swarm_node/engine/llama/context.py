"""llama.cpp's context behind arrays: rows of tokens in, the logits of their last ones out.

- Each row is a sequence with room of its own (`kv_unified` off), which is 2.4 times as fast for many of them as sharing
  a cache. So a context is made for a number of rows and a width, and copying a row copies its whole room.
- float32 computes attention in float32, too, and comes as near to torch as torch to itself. The others take flash
  attention with a cache in half precision, which is much faster.
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
"""Given to llama.cpp at once; longer prompts go in parts."""

WIDTH_STEP = 256
"""llama.cpp rounds the room of a row up to this."""

DECODED, OUT_OF_MEMORY = 0, -2
"""What `llama_decode` may return, among others."""

_FIELDS: dict[str, Any] = {field[0]: field[1] for field in llama_cpp.llama_batch._fields_}

Ints = NDArray[np.integer]


class LlamaContext:
    """Room for so many rows of so many tokens."""

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
        self._model = model  # which must not go before
        self._memory = llama_cpp.llama_get_memory(self.pointer)
        self._vocabulary = model.vocabulary
        self.rows, self.width = rows, width

    def step(self, tokens: Ints, positions: Ints, rows: Ints) -> NDArray[np.float32]:
        """Append tokens to rows, those of a row together; the logits after the last of each, valid until the next."""
        last = np.append(rows[1:] != rows[:-1], True)
        parts = [slice(first, first + BATCH_TOKENS) for first in range(0, len(tokens), BATCH_TOKENS)]
        if len(parts) == 1:
            return self._decode(tokens, positions, rows, last)
        return np.concatenate(
            [self._decode(tokens[part], positions[part], rows[part], last[part]).copy() for part in parts]
        )

    def copy(self, source: int, targets: Iterable[int]) -> None:
        """Make rows the same as another."""
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
        """One batch; the logits [n, V] of the tokens for which they are wanted, in llama.cpp's own memory."""
        count = len(tokens)
        tokens, positions, rows = (np.ascontiguousarray(one, np.int32) for one in (tokens, positions, rows))
        ones, flags = np.ones(count, np.int32), np.ascontiguousarray(wanted, np.int8)
        # A token may belong to several rows, so llama.cpp wants a pointer to the rows of each.
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
