"""Operations whose result for one row depends, to the bit, on that row alone: not on the batch, its slot or threads.

- **Products** (`RowProducts`): libraries choose their kernel by the number of rows. So rows are multiplied in blocks of
  a few heights (`HEIGHTS`), the last block padded with zeros. When a model is loaded, `RowProducts.checked` compares
  all heights, and one thread with many, on its matrices; only heights that agree to the bit are used.
- **Attention** (`attend`): every token is a query of its own, with the same shape in a prompt and in decoding. Keys are
  read in blocks of `KEY_BLOCK`, so no sum depends on the length of other rows. Later keys add exact zeros. Libraries
  divide the heads of few tokens among threads, into numbers of rows with other kernels: where `serial_below` finds
  that, few tokens use one thread.
- **Elementwise** operations are those that IEEE 754 defines: +, −, ×, ÷ and the square root. A library's exponential
  has other bits in the last few values of a vector, so `silu` computes its own.
- **Sums** over one row (the norm, softmax) are reduced by one thread in an order that the row's width alone decides.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch

from protocol.errors import EngineFailed

HEIGHTS = (256, *range(64, 0, -8))
"""Rows of one product. Fewer than 8 would be divided among threads into blocks of fewer than 4, which have kernels of
their own."""

PADDING_MAX = 8
"""Rows of padding from which one more block is cheaper."""

KEY_BLOCK = 64
"""Keys and values that are read at once."""

QUERIES_MAX = 64
"""Tokens whose attention is computed at once. They need as many blocks of keys as the last of them, and the keys that
are gathered for a prompt's stay in a cache: with 4 heads of 64 values, 4 MiB for a block."""

TOKENS_COMPARED = range(1, QUERIES_MAX + 1)
"""Numbers of tokens whose attention is compared when a model is loaded: all that are computed at once."""

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]
"""`attend`, with all threads."""

Times = Callable[[torch.Tensor], torch.Tensor]
"""A product with some matrix: [rows, inputs] → [rows, outputs]."""


HEAD_HEIGHTS = (64, 32, 16, 8)
"""Rows of one product with the vocabulary, which takes longer to compare than all others together."""


class RowProducts:
    """Products in blocks of rows."""

    def __init__(self, heights: Sequence[int]) -> None:
        self.heights = tuple(sorted(heights, reverse=True))

    @staticmethod
    def checked(every: Sequence[tuple[Times, int]], device: torch.device, heights: Sequence[int]) -> "RowProducts":
        """Return products in the heights that agree on every (product, number of inputs) here; raise if none does.

        The reference is the tallest block on one thread. With all threads, a block that is moved by one row must have
        the same rows, and the lower heights those of its beginning and its end.
        """
        tallest, agreeing = max(heights), set(heights)
        threads = torch.get_num_threads()
        for times, inputs in every:
            rows = numbers((tallest, inputs), device)
            with _one_thread():
                expected = times(rows)
            if not torch.equal(times(rows.roll(1, 0)), expected.roll(1, 0)):
                agreeing.clear()
            agreeing -= {each for each in agreeing if not torch.equal(times(rows[:each]), expected[:each])}
            agreeing -= {each for each in agreeing if not torch.equal(times(rows[-each:].clone()), expected[-each:])}
        if not agreeing:
            raise EngineFailed(
                f"Products on this machine depend on the number of rows or on its {threads} threads, so it cannot "
                "sample exactly.",
                hint="Use one thread, or another `--dtype`.",
            )
        return RowProducts(tuple(agreeing))

    def times(self, product: Times, values: torch.Tensor) -> torch.Tensor:
        """Return the product of [..., inputs]."""
        rows = values.flatten(0, -2)
        if len(rows) in self.heights:  # the usual step of a full batch
            return product(rows).view(*values.shape[:-1], -1)
        results, start = [], 0
        for height in self.blocks(len(rows)):
            block = rows[start : start + height]
            if missing := height - len(block):
                block = torch.cat((block, block.new_zeros(missing, block.shape[1])))
            results.append(product(block)[: height - missing])
            start += height
        whole = results[0] if len(results) == 1 else torch.cat(results)
        return whole.view(*values.shape[:-1], whole.shape[-1])

    def blocks(self, rows: int) -> Iterator[int]:
        """Yield the heights of the blocks of some rows: the tallest that are full, and the last one padded."""
        while rows > 0:
            full = max((height for height in self.heights if height <= rows), default=0)
            padded = min((height for height in self.heights if height >= rows), default=0)
            height = padded if padded and (not full or padded - rows < PADDING_MAX) else full
            yield height
            rows -= height


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def numbers(sizes: Sequence[int], device: torch.device, salt: int = 0) -> torch.Tensor:
    """Return float32 numbers from -1 to 1 that are the same on every machine."""
    count = torch.Size(sizes).numel()
    mixed = (torch.arange(count, dtype=torch.int64) + salt) * 2654435761 % 2**32
    mixed = (mixed ^ (mixed >> 15)) * 2246822519 % 2**32
    return ((mixed >> 8).float() * 2.0**-23 - 1).view(*sizes).to(device)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor | None,
    positions: torch.Tensor,
    *,
    serial: int = 0,
) -> torch.Tensor:
    """Return the attention of each token over its row of the cache, up to its own position: [n, kv_heads, heads, head].

    query: [n, kv_heads, heads per kv_head, head]; keys, values: [blocks, rows, kv_heads, KEY_BLOCK, head];
    rows: [n] of the cache; None: token i is in row i. Fewer than `serial` tokens at once use one thread.
    """
    return attend_spans(query, keys, values, spans(rows, positions), serial)


class Span(NamedTuple):
    """Tokens whose attention is computed at once; the same for all layers of a model."""

    at: slice
    tokens: int
    rows: torch.Tensor | None
    """[tokens]; None: token i is in row i of the cache."""
    blocks: int
    """Blocks of keys up to the last token."""
    later: torch.Tensor
    """[tokens, 1, blocks · KEY_BLOCK]: keys that a token does not see."""


def spans(rows: torch.Tensor | None, positions: torch.Tensor) -> list[Span]:
    """Return the tokens in spans of at most `QUERIES_MAX`."""
    found = []
    for start in range(0, len(positions), QUERIES_MAX):
        at = slice(start, min(start + QUERIES_MAX, len(positions)))
        own = positions[at]
        blocks = int(own.max()) // KEY_BLOCK + 1
        later = torch.arange(blocks * KEY_BLOCK, device=positions.device) > own[:, None]
        found.append(Span(at, len(own), None if rows is None else rows[at], blocks, later[:, None]))
    return found


def attend_spans(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, parts: Sequence[Span], serial: int
) -> torch.Tensor:
    """Do the same as `attend` for tokens in spans."""
    mixed = []
    for span in parts:
        with _one_thread() if span.tokens < serial else nullcontext():
            mixed.append(_attend(query[span.at], keys, values, span))
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


def serial_below(kv_heads: int, heads: int, head: int, device: torch.device, attention: Attention = attend) -> int:
    """Return the number of tokens from which attention gives the bits of one thread with all threads, too.

    Raise `EngineFailed` if even one thread gives a token other bits beside others than alone.
    """
    most = max(TOKENS_COMPARED)
    cache = numbers((2, 2, 1, kv_heads, KEY_BLOCK, head), device)
    query = numbers((most, kv_heads, heads, head), device, 3)
    places = 2 * KEY_BLOCK - 1 - torch.arange(most, device=device) % KEY_BLOCK
    row = torch.zeros_like(places)

    def some(count: int) -> torch.Tensor:
        return attention(query[:count], cache[0], cache[1], row[:count], places[:count])

    with _one_thread():
        expected = some(most)
        if not all(torch.equal(some(count), expected[:count]) for count in TOKENS_COMPARED):
            raise EngineFailed(
                "Attention on this machine depends on the number of tokens, so it cannot sample exactly.",
                hint="Choose another `--dtype`.",
            )
    differing = [count for count in TOKENS_COMPARED if not torch.equal(some(count), expected[:count])]
    if most in differing:
        return sys.maxsize
    return max(differing, default=0) + 1


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: Span) -> torch.Tensor:
    count, kv_heads, heads, head = query.shape
    flat = query.reshape(count * kv_heads, heads, head)

    def read(block: torch.Tensor) -> torch.Tensor:
        chosen = block[span.at] if span.rows is None else block.index_select(0, span.rows)
        return chosen.reshape(count * kv_heads, KEY_BLOCK, head)

    scores = [torch.bmm(flat, read(keys[block]).mT) for block in range(span.blocks)]
    whole = scores[0] if span.blocks == 1 else torch.cat(scores, dim=-1)
    whole *= torch.tensor(head**-0.5, dtype=torch.float32)
    whole.view(count, kv_heads * heads, -1).masked_fill_(span.later, -torch.inf)
    chances = torch.softmax(whole, dim=-1)
    mixed = torch.zeros_like(flat)  # also for one block: 0 + (-0) is 0
    for block, part in enumerate(torch.split(chances, KEY_BLOCK, dim=-1)):
        mixed += torch.bmm(part.contiguous(), read(values[block]))
    return mixed.view(query.shape)


def normed(values: torch.Tensor, weight: torch.Tensor, epsilon: torch.Tensor) -> torch.Tensor:
    """Return values divided by their root mean square over the last dimension, times a weight."""
    return (values * values.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()).mul_(weight)


def _constants(*values: float) -> tuple[torch.Tensor, ...]:
    """Return float32 values, whatever torch's default is."""
    return tuple(torch.tensor(value, dtype=torch.float32) for value in values)


LOG2E, LN2_HIGH, LN2_LOW = _constants(1.4426950408889634, 0.693145751953125, 1.428606765330187e-06)
"""LN2_HIGH has 15 bits, so that its product with a small integer is exact. Tensors, as numbers cost a call more."""

EXP_SERIES = _constants(*(1 / factorial for factorial in (5040, 720, 120, 24, 6, 2, 1, 1)))


def silu(values: torch.Tensor) -> torch.Tensor:
    """Return x / (1 + exp(-x)), by IEEE operations alone."""
    negated = values.clamp(-87.0, 87.0).neg_()
    power = (negated * LOG2E).round_()
    rest = (negated - power * LN2_HIGH).sub_(power * LN2_LOW)  # |rest| ≤ ln 2 / 2
    exponential = (rest * EXP_SERIES[0]).add_(EXP_SERIES[1])
    for coefficient in EXP_SERIES[2:]:
        exponential.mul_(rest).add_(coefficient)
    scale = power.int().add_(127).bitwise_left_shift_(23).view(torch.float32)  # 2^power
    return values / exponential.mul_(scale).add_(EXP_SERIES[-1])
