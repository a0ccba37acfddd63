"""The engine on llama.cpp: for consumer graphics cards, Apple and CPUs; supports the architectures of `recipes`.

- It does not need torch.
- The precision is that of the weights: float32, float16, bfloat16, or q8_0 (8 bits with a scale for every 32 weights).

`Decoder` on llama.cpp: rows share their prompt's computation, in a context that grows on demand.

- llama.cpp computes only adjacent rows together. Hence prompts are computed in the first of the new rows and copied
  from there, and rows move up when others are removed.
- When the context is too small, the existing rows are computed again in a larger one: llama.cpp cannot move rows
  between contexts of different sizes. This happens a few times in a node's life, since a context is kept.

Array interface to llama.cpp's context: rows of tokens in, logits of the last tokens out.

- Each row is a sequence with its own part of the cache (`kv_unified` off), which is 2.4 times as fast for many rows as
  a shared cache. So a context has a fixed number of rows and a fixed width, and copying a row copies its whole part.
- llama.cpp copies a row only when it next computes something. Until then the target has no data to save, and the source
  must not be overwritten by a restored row.
- float32 also computes attention in float32, and differs from torch no more than torch from itself. The other types use
  flash attention with a cache in half precision, which is much faster.

`protocol.work.sampling` on the raw logits of llama.cpp, in numpy: a token for each row, and its log-probability.

- The token is the same as `pick`'s, bit for bit, at half the cost: sums over parts of the vocabulary locate it, and
  only one part is summed token by token. Where rounding could make a difference, `pick` itself decides.
- Rows are processed a few at a time, so that a large vocabulary stays in the CPU cache.
"""

import ctypes
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from protocol import limits
from protocol.work.sampling import pick
from swarm_node.engine.decoder import Decoder, OwnTemperatures, SavedRow
from swarm_node.engine.engine import Engine
from swarm_node.engine.llama.ggml import Type
from swarm_node.engine.llama.weights import LlamaModel
from swarm_node.engine.turn_cache import SIZE_MAX_BYTES

BLOCK_VALUES = 2**18
"""Logits processed at once: 1 MiB."""

PART = 512
"""Tokens per part of the vocabulary; about the square root of a large vocabulary."""

DOUBT = 1e-9
"""Share of the total: far more than the order of summing a million float64 can change."""


@dataclass(frozen=True)
class NumpyLogits:
    """`Logits` in numpy: [rows, V], in float32."""

    values: NDArray[np.float32]

    def draw(
        self, temperatures: Sequence[float], uniforms: Sequence[float], own: OwnTemperatures = ()
    ) -> tuple[list[int], list[float]]:
        step = max(1, BLOCK_VALUES // self.values.shape[1])
        tokens: list[int] = []
        logprobs: list[float] = []
        for first in range(0, len(self.values), step):
            rows = slice(first, first + step)
            drawn = _draw(self.values[rows], temperatures[rows], uniforms[rows], own[rows])
            tokens += drawn[0]
            logprobs += drawn[1]
        return tokens, logprobs

    def logprobs(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        shifted = self.values - self.values.max(-1, keepdims=True)
        totals = np.exp(shifted).sum(-1, dtype=np.float64)
        scores: NDArray[np.float32] = (shifted[np.arange(len(tokens)), tokens] - np.log(totals)).astype(np.float32)
        return scores


@np.errstate(invalid="ignore")  # infinite logits become NaN, which is reported
def _draw(
    logits: NDArray[np.float32], temperatures: Sequence[float], uniforms: Sequence[float], own: OwnTemperatures
) -> tuple[list[int], list[float]]:
    scores, flat, weights, sums = _weights(logits, temperatures)
    if all(each is None for each in own):
        drawn = [_search(*row) for row in zip(flat, weights, sums, uniforms, strict=True)]
    else:
        drawn = _draw_at(logits, temperatures, uniforms, own)
    places = (np.arange(len(logits)), drawn)
    # Rounding may exceed 0; a token drawn at a higher temperature may be less likely than any that this one draws.
    logprobs = np.clip(scores[places] - np.log(sums[:, -1]), limits.LOGPROB_MIN, 0.0).astype(np.float32)
    return drawn, logprobs.tolist()


def _draw_at(
    logits: NDArray[np.float32], temperatures: Sequence[float], uniforms: Sequence[float], own: OwnTemperatures
) -> list[int]:
    """Return the token of each row, drawn at its own temperature where it has one."""
    chosen = [temperature if each is None else each or 1.0 for temperature, each in zip(temperatures, own, strict=True)]
    _, flat, weights, sums = _weights(logits, chosen)
    return [
        int(logits[row].argmax()) if each == 0 else _search(flat[row], weights[row], sums[row], uniforms[row])
        for row, each in enumerate(own)
    ]


def _weights(logits: NDArray[np.float32], temperatures: Sequence[float]) -> tuple[NDArray[np.float32], Any, Any, Any]:
    """Return logits divided by temperatures, below 0; their powers of e, whole and in parts; and the sums of these."""
    rows, vocabulary = logits.shape
    divisors = np.array(temperatures, np.float32)
    scores = logits if (divisors == 1).all() else logits / divisors[:, None]
    scores = scores - scores.max(-1, keepdims=True)
    weights = np.zeros((rows, -(-vocabulary // PART), PART), np.float32)  # padding of the last part is never drawn
    flat = weights.reshape(rows, -1)
    np.exp(scores, out=flat[:, :vocabulary])
    return scores, flat, weights, weights.sum(-1, dtype=np.float64).cumsum(-1)  # sums: [rows, parts]


def _search(flat: NDArray[np.float32], parts: NDArray[np.float32], sums: NDArray[np.float64], uniform: float) -> int:
    """Return the token of one row; 0 if its weights are no distribution."""
    total = float(sums[-1])
    if not np.isfinite(total):
        return 0
    target = uniform * total
    part = min(int(sums.searchsorted(target, "right")), len(sums) - 1)
    before = float(sums[part - 1]) if part else 0.0
    inner = parts[part].cumsum(dtype=np.float64) + before
    place = int(inner.searchsorted(target, "right"))
    lower = float(inner[place - 1]) if place else before
    if place == PART or min(target - lower, float(inner[place]) - target) < DOUBT * total:
        return pick(flat, uniform)
    return part * PART + place


BATCH_TOKENS = 2048
"""Tokens passed to llama.cpp at once; longer prompts are split."""

WIDTH_STEP = 256
"""llama.cpp rounds the width of a row up to a multiple of this."""

DECODED, OUT_OF_MEMORY = 0, -2
"""Some return values of `llama_decode`."""

_FIELDS: dict[str, Any] = {field[0]: field[1] for field in llama_cpp.llama_batch._fields_}

_BYTES = ctypes.POINTER(ctypes.c_uint8)

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
        self._copied = set[int]()
        """Targets of copies that llama.cpp has not made yet."""

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
                self._copied.add(target)

    def state(self, row: int) -> NDArray[np.uint8] | None:
        """Return the data of a row; None while it is only about to be copied from another."""
        if row in self._copied:
            return None
        values = np.empty(llama_cpp.llama_state_seq_get_size(self.pointer, row), np.uint8)
        llama_cpp.llama_state_seq_get_data(self.pointer, values.ctypes.data_as(_BYTES), len(values), row)
        return values

    def restore(self, row: int, state: NDArray[np.uint8]) -> None:
        """Replace a row by saved data."""
        if self._copied:
            self.step(np.zeros(1, int), np.zeros(1, int), np.array([row]))  # any token: this makes the copies
        self.remove(row)
        if not llama_cpp.llama_state_seq_set_data(self.pointer, state.ctypes.data_as(_BYTES), len(state), row):
            raise MemoryError("llama.cpp does not take the state of a row")

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
        self._copied.clear()
        if result == OUT_OF_MEMORY:
            raise MemoryError
        if result != DECODED:
            raise RuntimeError(f"llama.cpp answers {result} to {count} tokens")
        if not (outputs := int(flags.sum())):
            return np.empty((0, self._vocabulary), np.float32)
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self.pointer), (outputs, self._vocabulary))


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

    def save(self, row: int) -> SavedRow | None:
        assert self._context is not None
        state = self._context.state(row)
        return None if state is None else SavedRow(state, len(self._rows[row]), len(state))

    def resume(self, saved: Sequence[SavedRow], texts: Sequence[Sequence[int]]) -> NumpyLogits:
        first = len(self._rows)
        context = self._room(first + len(saved), max(map(len, texts)))
        for number, row in enumerate(saved, first):
            context.restore(number, row.values)
        logits = _append(context, texts, first, [row.length for row in saved])
        self._rows += [list(text) for text in texts]
        return NumpyLogits(logits)

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


def _append(
    context: LlamaContext, texts: Sequence[Sequence[int]], first: int, starts: Sequence[int] = ()
) -> NDArray[np.float32]:
    """Compute texts in new rows, starting at row `first`; each from its position in `starts` on."""
    begins = starts or [0] * len(texts)
    return context.step(
        np.concatenate([np.array(text[start:]) for text, start in zip(texts, begins, strict=True)]),
        np.concatenate([np.arange(start, len(text)) for text, start in zip(texts, begins, strict=True)]),
        np.repeat(
            np.arange(first, first + len(texts)),
            [len(text) - start for text, start in zip(texts, begins, strict=True)],
        ),
    )


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
