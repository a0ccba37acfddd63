"""Qwen3, Qwen2 and Llama in float32: a token's result depends, to the bit, on the text before it alone.

- `ExactModel.extend` is the only forward pass. A prompt, a decoding step, a continued turn and an auditor's replay are
  the same call with other tokens, so any division of a text into calls gives the same bits.
- `ExactModel.check` compares the kernels of this machine on the weights that were loaded; it must pass before use. A
  swap needs no other check: kernels are chosen by sizes and threads, which stay.
- `probe` tells kinds of machines apart: two have one class only if they compute a fixed text to the same bits, with the
  same release of torch. Another release may have another kernel where the text does not show it.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch.nn.functional import embedding

from protocol.work.lease import EXACT
from swarm_exact.drawing import draw
from swarm_exact.matrices import Layer, PolicyWeights
from swarm_exact.operations import (
    HEAD_HEIGHTS,
    HEIGHTS,
    KEY_BLOCK,
    RowProducts,
    attend_spans,
    normed,
    numbers,
    serial_below,
    silu,
    spans,
)
from swarm_exact.shape import ModelShape

PROBE_VOCABULARY = 4096
"""The most tokens of a probe's vocabulary: the order of a product's sums does not depend on the number of outputs."""

PROBE_TOKENS = 96
"""More than one block of keys."""

PROBE_DIGITS = 12
"""The length of a probe in the name of a class: 48 bits."""


class KeysValues:
    """The keys and values of some rows, in blocks of positions: a block of the first rows is contiguous."""

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self.values = self._zeros(0, 0)
        """[layers, 2, blocks, rows, kv_heads, KEY_BLOCK, head]"""

    def grow(self, rows: int, positions: int, kept_rows: int) -> bool:
        """Make space for `rows` rows of `positions` positions, if it is not there; return True if it was made.

        The first `kept_rows` then have the contents they had; all else is zero.
        """
        had_blocks, had_rows = self.values.shape[2:4]
        blocks = -(-positions // KEY_BLOCK)
        if rows <= had_rows and blocks <= had_blocks:
            return False
        old, self.values = self.values, self._zeros(max(blocks, had_blocks), max(rows, had_rows))
        self.values[:, :, :had_blocks, :kept_rows] = old[:, :, :, :kept_rows]
        return True

    def copy(self, row: int, count: int, positions: int) -> None:
        """Copy the first positions of a row, in whole blocks, to the `count` rows after it."""
        used = self.values[:, :, : -(-positions // KEY_BLOCK)]
        used[:, :, :, row + 1 : row + 1 + count] = used[:, :, :, row : row + 1]

    def clear(self) -> None:
        """Free the memory."""
        self.values = self._zeros(0, 0)

    def _zeros(self, blocks: int, rows: int) -> torch.Tensor:
        shape = self._shape
        sizes = shape.layers, 2, blocks, rows, shape.kv_heads, KEY_BLOCK, shape.head
        # Zeros, not garbage: a masked NaN is still NaN.
        return torch.zeros(sizes, dtype=torch.float32, device=self._device)


class ExactModel:
    """One model; `weights` is filled by the caller."""

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.weights = PolicyWeights(shape, device, torch.float32)
        self._products, self._head_products = RowProducts(HEIGHTS), RowProducts(HEAD_HEIGHTS)
        self._serial = 0
        """Tokens below which attention uses one thread."""
        self._epsilon = torch.tensor(shape.epsilon, dtype=torch.float32)
        self._cos = self._sin = torch.empty(0, shape.head, dtype=torch.float32, device=device)
        """The angles of each position; the sine of the first half is negated."""

    @torch.inference_mode()
    def check(self) -> None:
        """Choose products and threads that agree here, on the loaded weights; raise `EngineFailed` if none do."""
        shape = self.shape
        layer = self.weights.layers[0]
        every = [(part.times, part.inputs) for part in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        self._products = RowProducts.checked(every, self.device, HEIGHTS)
        self._head_products = RowProducts.checked([(self._head, shape.hidden)], self.device, HEAD_HEIGHTS)
        self._serial = serial_below(shape.kv_heads, shape.heads // shape.kv_heads, shape.head, self.device)

    def cache(self) -> KeysValues:
        """Return a cache without rows."""
        return KeysValues(self.shape, self.device)

    def extend(
        self, cache: KeysValues, tokens: torch.Tensor, rows: torch.Tensor | None, positions: torch.Tensor
    ) -> torch.Tensor:
        """Add tokens to rows of the cache, which must have space for them; return the state of each: [n, hidden].

        tokens, rows, positions: [n], in any order; the earlier tokens of each row are in the cache or in this call.
        Without `rows`, token i is in row i.
        """
        self._turn_to(int(positions.max()) + 1)
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]  # [n, 1, head]
        owners = torch.arange(len(tokens), device=self.device) if rows is None else rows
        blocks, places = positions // KEY_BLOCK, positions % KEY_BLOCK
        parts = spans(rows, positions)
        hidden = embedding(tokens, self.weights.embedding)  # [n, hidden]
        for number, layer in enumerate(self.weights.layers):
            keys, values = cache.values[number]
            query, key, value = self._project(layer, hidden, cos, sin)
            keys[blocks, owners, :, places] = key
            values[blocks, owners, :, places] = value
            grouped = query.view(len(tokens), self.shape.kv_heads, -1, self.shape.head)
            mixed = attend_spans(grouped, keys, values, parts, self._serial).view(len(tokens), -1)
            hidden = hidden + self._products.times(layer.out.times, mixed)
            between = normed(hidden, layer.mlp_norm, self._epsilon)
            gate, up = self._products.times(layer.gate_up.times, between).chunk(2, dim=-1)
            hidden = hidden + self._products.times(layer.down.times, silu(gate).mul_(up))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits after some states: [n, vocabulary]."""
        return self._head_products.times(self._head, normed(hidden, self.weights.norm, self._epsilon))

    def _head(self, values: torch.Tensor) -> torch.Tensor:
        return values @ self.weights.head.t()

    def _project(
        self, layer: Layer, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values [n, heads of each, head], with rotary positions applied."""
        shape = self.shape
        turned = shape.heads + shape.kv_heads
        flat = self._products.times(layer.qkv.times, normed(hidden, layer.norm, self._epsilon))
        if layer.qkv_bias is not None:
            flat = flat + layer.qkv_bias
        every = flat.view(len(flat), -1, shape.head)
        both = every[:, :turned]
        if layer.qk_norm is not None:
            both = normed(both, layer.qk_norm, self._epsilon)
        left, right = both.chunk(2, dim=-1)
        both = (both * cos).add_(torch.cat((right, left), dim=-1).mul_(sin))
        return both[:, : shape.heads].contiguous(), both[:, shape.heads :], every[:, turned:]

    def _turn_to(self, width: int) -> None:
        """Compute the rotary angles of at least `width` positions."""
        if len(self._cos) >= width:
            return
        exponents = torch.arange(0, self.shape.head, 2, dtype=torch.float32) / self.shape.head
        inverses = [1 / self.shape.rope_base**exponent for exponent in exponents.tolist()]
        frequencies = torch.tensor(inverses, dtype=torch.float32)
        angles = torch.outer(torch.arange(2 * width, dtype=torch.float32), frequencies)

        def table(function: Callable[[float], float]) -> torch.Tensor:
            # Rounded from float64: a library's vectors have other bits than its single values.
            values = [[function(angle) for angle in row] for row in angles.tolist()]
            return torch.tensor(values, dtype=torch.float32, device=self.device).repeat(1, 2)  # [positions, head]

        self._cos, self._sin = table(math.cos), table(math.sin)
        self._sin[:, : self.shape.head // 2].neg_()


def release(version: str) -> str:
    """Return the release of a version of torch, without the build: 2.13.0 of 2.13.0+cpu."""
    return version.partition("+")[0]


@torch.inference_mode()
def probe(shape: ModelShape, device: torch.device) -> str:
    """Return a digest of the bits of one layer of these sizes with fixed weights on a fixed text."""
    cut = replace(shape, layers=1, vocabulary=min(shape.vocabulary, PROBE_VOCABULARY))
    model = ExactModel(cut, device)
    for salt, (place, size) in enumerate(model.weights.places.values()):
        given = numbers(size, device, salt).mul_(size[-1] ** -0.5 if len(size) > 1 else 1.0)
        place.copy_(given.view(place.shape) if given.numel() == place.numel() else given)
    model.check()
    cache = model.cache()
    cache.grow(1, PROBE_TOKENS, 0)
    places = torch.arange(PROBE_TOKENS, device=device)
    tokens = places * 7919 % cut.vocabulary
    logits = model.logits(model.extend(cache, tokens, torch.zeros_like(places), places))
    halves = torch.full((PROBE_TOKENS,), 0.5, dtype=torch.float64, device=device)
    drawn, logprobs = draw(logits, torch.ones(PROBE_TOKENS, dtype=torch.float32, device=device), halves)
    digest = hashlib.sha256(release(torch.__version__).encode())
    for part in (logits, drawn, logprobs):
        digest.update(part.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:PROBE_DIGITS]


@cache
def numerics(shape: ModelShape, device: torch.device) -> str:
    """Return the class of numerics of this machine for exact models of these sizes."""
    return f"{EXACT}/fp32/{device.type}-{probe(shape, device)}"
