"""Qwen3, Qwen2 and Llama in plain torch: fused weights, a preallocated key-value cache, and no copies.

- `swarm_exact.matrices` holds the weights.
- Each row of the cache belongs to one sample, and live rows are the first ones: a step works on slices.
- Grouped queries are laid out like positions; keys and values are not repeated for them.
- Only Qwen3 normalizes each query and key, and only Qwen2 adds a bias to queries, keys and values.
- `swarm_exact.shape.supports` refuses what this file does not implement (rope scaling, sliding windows, other biases).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu

from swarm_exact.cards import repeat_heads
from swarm_exact.matrices import Layer, PolicyWeights
from swarm_exact.shape import ModelShape
from swarm_node.engine.decoder import SavedRow
from swarm_node.engine.torch import weights
from swarm_node.engine.torch.sampler import TorchLogits

WIDTH_STEP = 64
"""Smallest growth of the cache, in positions."""


class Qwen3:
    """`Decoder` of one policy folder."""

    joins_midway = True

    def __init__(self, folder: Path, config: dict[str, Any], device: torch.device, dtype: torch.dtype) -> None:
        self._shape = shape = ModelShape.from_config(config)
        self.device, self.dtype = device, dtype
        self.numerics = weights.numerics(device, dtype)
        self.vocab_size, self.positions_max = shape.vocabulary, int(config["max_position_embeddings"])
        self._weights = PolicyWeights(shape, device, dtype)
        self.parameters = self._weights.parameters
        self._tensors = weights.ModelTensors(self._weights.places, self._weights.ignored)
        exponents = torch.arange(0, shape.head, 2, dtype=torch.float32, device=device) / shape.head
        self._frequencies = 1.0 / shape.rope_base**exponents  # [head / 2]
        self._rows = self._width = 0
        """Live rows, and the length of the longest."""
        self._cache = self._empty(shape.layers, 2, 0, shape.kv_heads, 0, shape.head)
        self._lengths = torch.zeros(0, dtype=torch.long, device=device)
        self._cos = self._sin = self._empty(0, shape.head)
        if wrong := self._tensors.fill(folder):
            raise ValueError(f"its tensors are not those that config.json describes: {', '.join(wrong[:5])}")

    def swap(self, folder: Path) -> bool:
        return self._tensors.swap(folder, used=self._weights.named)

    def prefill(self, prompts: Sequence[Sequence[int]], copies: Sequence[int]) -> TorchLogits:
        longest = max(map(len, prompts))
        # Padded on the right: the padding is after the whole prompt, which therefore never attends to it.
        padded = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=self.device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        counts = torch.tensor(copies, device=self.device)
        owners = torch.arange(len(prompts), device=self.device).repeat_interleave(counts)
        first, last = self._rows, self._rows + len(owners)
        self._grow(last, longest)
        self._rope_to(longest)
        cos, sin = self._cos[:longest, None], self._sin[:longest, None]

        hidden = embedding(padded, self._weights.embedding).to(self.dtype)  # [prompts, T, hidden]
        for number, layer in enumerate(self._weights.layers):
            query, key, value = self._project(layer, hidden, cos, sin)
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
            self._cache[number, 0, first:last, :, :longest] = key[owners]
            self._cache[number, 1, first:last, :, :longest] = value[owners]
            # Leftovers of an earlier sample are masked, but a masked NaN is still NaN.
            self._cache[number, :, first:last, :, longest:] = 0
            if self.device.type == "cuda" and self.dtype == torch.float32:
                key, value = repeat_heads(key, query), repeat_heads(value, query)
            mixed = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            hidden = self._finish(layer, hidden, mixed.transpose(1, 2).flatten(2))
        self._lengths[first:last] = lengths[owners]
        self._rows, self._width = last, max(self._width, longest)
        final = hidden[torch.arange(len(prompts), device=self.device), lengths - 1]
        return TorchLogits(self._logits(final)[owners])

    def decode(self, tokens: Sequence[int]) -> TorchLogits:
        shape, rows = self._shape, self._rows
        self._grow(rows, self._width + 1)
        self._width += 1
        self._rope_to(self._width)
        places = self._lengths[:rows]
        everyone = torch.arange(rows, device=self.device)
        cos, sin = self._cos[places][:, None], self._sin[places][:, None]  # [rows, 1, head]
        seen = torch.arange(self._width, device=self.device) <= places[:, None]
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device).masked_fill_(~seen, float("-inf"))
        mask = mask[:, None, None]  # [rows, 1, 1, width]

        newest = torch.tensor(tokens, device=self.device)
        hidden = embedding(newest, self._weights.embedding).to(self.dtype)  # [rows, hidden]
        for number, layer in enumerate(self._weights.layers):
            query, key, value = self._project(layer, hidden, cos, sin)
            keys, values = self._cache[number, 0, :rows], self._cache[number, 1, :rows]
            keys[everyone, :, places] = key
            values[everyone, :, places] = value
            folded = query.view(rows, shape.kv_heads, -1, shape.head)  # [rows, kv_heads, heads per kv_head, head]
            mixed = scaled_dot_product_attention(
                folded, keys[:, :, : self._width], values[:, :, : self._width], attn_mask=mask
            )
            hidden = self._finish(layer, hidden, mixed.reshape(rows, -1))
        places += 1
        return TorchLogits(self._logits(hidden))

    def move(self, sources: Sequence[int], targets: Sequence[int], rows: int) -> None:
        if sources:
            self._cache[:, :, targets, :, : self._width] = self._cache[:, :, sources, :, : self._width]
            self._lengths[targets] = self._lengths[sources]
        self._rows = rows
        self._width = int(self._lengths[:rows].max()) if rows else 0

    def save(self, row: int) -> SavedRow:
        length = int(self._lengths[row])
        values = self._cache[:, :, row, :, :length].clone()
        return SavedRow(values, length, values.numel() * values.element_size())

    def resume(self, saved: Sequence[SavedRow], texts: Sequence[Sequence[int]]) -> TorchLogits:
        new = [text[row.length :] for row, text in zip(saved, texts, strict=True)]
        longest = max(map(len, new))
        padded = torch.tensor([[*text, *[0] * (longest - len(text))] for text in new], device=self.device)
        counts = torch.tensor([len(text) for text in new], device=self.device)
        starts = torch.tensor([row.length for row in saved], device=self.device)
        first, last = self._rows, self._rows + len(saved)
        width = max(row.length for row in saved) + longest
        self._grow(last, width)
        self._rope_to(width)
        self._cache[:, :, first:last] = 0  # see `prefill`
        for number, row in enumerate(saved, first):
            self._cache[:, :, number, :, : row.length] = row.values
        places = starts[:, None] + torch.arange(longest, device=self.device)  # [rows, T]
        cos, sin = self._cos[places][:, :, None], self._sin[places][:, :, None]  # [rows, T, 1, head]
        mask = torch.arange(width, device=self.device) <= places[:, :, None]
        mask = mask[:, None]  # [rows, 1, T, width]
        everyone = torch.arange(len(saved), device=self.device)[:, None]

        hidden = embedding(padded, self._weights.embedding).to(self.dtype)  # [rows, T, hidden]
        for number, layer in enumerate(self._weights.layers):
            query, key, value = self._project(layer, hidden, cos, sin)
            keys, values = self._cache[number, 0, first:last], self._cache[number, 1, first:last]
            keys[everyone, :, places] = key
            values[everyone, :, places] = value
            query, keys, values = query.transpose(1, 2), keys[:, :, :width], values[:, :, :width]
            if self.device.type == "cuda":
                keys, values = repeat_heads(keys, query), repeat_heads(values, query)
            mixed = scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
            hidden = self._finish(layer, hidden, mixed.transpose(1, 2).flatten(2))
        self._lengths[first:last] = starts + counts
        self._rows, self._width = last, max(self._width, width)
        return TorchLogits(self._logits(hidden[everyone[:, 0], counts - 1]))

    def clear(self) -> None:
        self._rows = self._width = 0
        self._cache = self._cache[:, :, :0, :, :0].clone()

    def _project(
        self, layer: Layer, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values [..., heads of each, head], with rotary positions applied."""
        shape = self._shape
        turned = shape.heads + shape.kv_heads
        flat = layer.qkv.times(self._normed(hidden, layer.norm))
        if layer.qkv_bias is not None:
            flat += layer.qkv_bias
        every = flat.view(*flat.shape[:-1], -1, shape.head)
        both = every[..., :turned, :]
        if layer.qk_norm is not None:
            both = self._normed(both, layer.qk_norm)
        left, right = both.chunk(2, dim=-1)
        both = both * cos + torch.cat((-right, left), dim=-1) * sin
        return both[..., : shape.heads, :], both[..., shape.heads :, :], every[..., turned:, :]

    def _finish(self, layer: Layer, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        hidden = hidden + layer.out.times(mixed)
        gate, up = layer.gate_up.times(self._normed(hidden, layer.mlp_norm)).chunk(2, dim=-1)
        return hidden + layer.down.times(silu(gate).mul_(up))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(self._normed(hidden, self._weights.norm).float(), self._weights.head)

    def _normed(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        exact = values.float()
        return (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self._shape.epsilon)).to(
            self.dtype
        ) * weight

    def _rope_to(self, width: int) -> None:
        """Compute the rotary angles of at least `width` positions."""
        if len(self._cos) >= width:
            return
        positions = torch.arange(2 * width, dtype=torch.float32, device=self.device)
        angles = torch.outer(positions, self._frequencies).repeat(1, 2)  # [positions, head]
        self._cos, self._sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def _grow(self, rows: int, width: int) -> None:
        """Grow the cache to at least `rows` rows of `width` positions; keep its contents."""
        had_rows, had_width = self._cache.shape[2], self._cache.shape[4]
        if rows <= had_rows and width <= had_width:
            return
        if width > had_width:
            width = max(width + WIDTH_STEP, had_width * 3 // 2)
        shape, old = self._shape, self._cache
        # Zeros, not garbage, for the same reason as in `prefill`.
        self._cache = torch.zeros(
            shape.layers, 2, max(rows, had_rows), shape.kv_heads, max(width, had_width), shape.head,
            dtype=self.dtype, device=self.device,
        )  # fmt: skip  # one line for the six sizes
        self._cache[:, :, : self._rows, :, : self._width] = old[:, :, : self._rows, :, : self._width]
        lengths = torch.zeros(max(rows, had_rows), dtype=torch.long, device=self.device)
        lengths[: self._rows] = self._lengths[: self._rows]
        self._lengths = lengths

    def _empty(self, *sizes: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype or self.dtype, device=self.device)
