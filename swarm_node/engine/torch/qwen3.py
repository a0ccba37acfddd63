"""Qwen3, Qwen2 and Llama in plain torch: fused weights, a preallocated key-value cache, and no copies.

- Each row of the cache belongs to one sample, and live rows are the first ones: a step works on slices.
- Query, key and value are one product, gate and up another, see `matrix`. The checkpoint's names lead to slices of the
  fused tensors, so the first load and every swap are the same copy into place.
- Grouped queries are laid out like positions; keys and values are not repeated for them.
- The head, and with tied weights the embedding, is kept in float32 in any dtype: rounded logits would cost more
  precision than all layers together.
- Only Qwen3 normalizes each query and key, and only Qwen2 adds a bias to queries, keys and values.
- `qwen3_shape.supports` refuses what this file does not implement (rope scaling, sliding windows, other biases).

`Matrix` stores weights in the order in which the products of a decoding step read them:

- The order is input by input: for the few rows of a step that is up to twice as fast as output by output.
- Large matrices are cut into contiguous tiles of outputs: the rows of a whole matrix are so far apart that a CPU reads
  each from another page, which costs a fifth of the time of products of up to 32 rows.
- Tiles are used only in float32 on a CPU: elsewhere libraries use their own layouts, and a matrix is one tile. So are
  small matrices.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu

from swarm_node.engine.decoder import SavedRow
from swarm_node.engine.torch import weights
from swarm_node.engine.torch.qwen3_shape import ModelShape
from swarm_node.engine.torch.sampler import TorchLogits

TILE_OUTPUTS = 256
"""The fastest of 128, 256 and 512."""

WHOLE_WEIGHTS_MAX = 2**18
"""1 MiB, which stays in a CPU cache: more tiles would only be more calls."""


class Matrix:
    """Several matrices with the same inputs, fused to one: [sum of outputs, inputs]."""

    def __init__(self, outputs: Sequence[int], inputs: int, device: torch.device, dtype: torch.dtype) -> None:
        self._outputs, self._inputs = outputs, inputs
        whole = width = sum(outputs)
        large = device.type == "cpu" and dtype == torch.float32 and whole * inputs > WHOLE_WEIGHTS_MAX
        if large and not any(size % TILE_OUTPUTS for size in outputs):
            width = TILE_OUTPUTS
        self.tiles = whole // width
        self._weights = torch.empty(self.tiles, inputs, width, device=device, dtype=dtype)

    def times(self, values: torch.Tensor) -> torch.Tensor:
        """Return the product, from [..., inputs] to [..., outputs]."""
        if self.tiles == 1:
            return values @ self._weights[0]
        rows = values.flatten(0, -2)
        products = rows.new_empty(len(rows), self.tiles, TILE_OUTPUTS)
        torch.bmm(rows.expand(self.tiles, -1, -1), self._weights, out=products.transpose(0, 1))
        return products.view(*values.shape[:-1], self.tiles * TILE_OUTPUTS)

    def places(self) -> list[tuple[torch.Tensor, torch.Size]]:
        """Return the view of each matrix, and its shape in the checkpoint."""
        if self.tiles == 1:
            parts = torch.split(self._weights[0].t(), list(self._outputs))
        else:
            parts = torch.split(self._weights.mT, [size // TILE_OUTPUTS for size in self._outputs])
        return [(part, torch.Size((size, self._inputs))) for part, size in zip(parts, self._outputs, strict=True)]


WIDTH_STEP = 64
"""Smallest growth of the cache, in positions."""

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


class Layer(NamedTuple):
    """The weights of one layer."""

    norm: torch.Tensor  # [hidden]
    qkv: Matrix  # [(heads + 2 kv_heads) · head, hidden]
    qkv_bias: torch.Tensor | None  # [(heads + 2 kv_heads) · head]
    qk_norm: torch.Tensor | None  # [heads + kv_heads, head]: that of the queries for every head, then that of the keys
    out: Matrix  # [hidden, heads · head]
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: Matrix  # [2 · intermediate, hidden]
    down: Matrix  # [hidden, intermediate]


class Qwen3:
    """`Decoder` of one policy folder."""

    joins_midway = True

    def __init__(self, folder: Path, config: dict[str, Any], device: torch.device, dtype: torch.dtype) -> None:
        self._shape = shape = ModelShape.from_config(config)
        self.device, self.dtype = device, dtype
        self.numerics = weights.numerics(device, dtype)
        self.vocab_size, self.positions_max = shape.vocabulary, int(config["max_position_embeddings"])
        # Stored input by input, as products read it.
        self._head = self._empty(shape.hidden, shape.vocabulary, dtype=torch.float32).t()
        self._embedding = self._head if shape.tied else self._empty(shape.vocabulary, shape.hidden)
        self._norm = self._empty(shape.hidden)
        self._layers = [self._layer() for _ in range(shape.layers)]
        self._places = self._named()
        self.parameters = sum(size.numel() for _, size in self._places.values())
        self._ignored = frozenset({"lm_head.weight"}) if shape.tied else frozenset()
        exponents = torch.arange(0, shape.head, 2, dtype=torch.float32, device=device) / shape.head
        self._frequencies = 1.0 / shape.rope_base**exponents  # [head / 2]
        self._rows = self._width = 0
        """Live rows, and the length of the longest."""
        self._cache = self._empty(shape.layers, 2, 0, shape.kv_heads, 0, shape.head)
        self._lengths = torch.zeros(0, dtype=torch.long, device=device)
        self._cos = self._sin = self._empty(0, shape.head)
        if wrong := weights.fill(self._places, folder, self._ignored):
            raise ValueError(f"its tensors are not those that config.json describes: {', '.join(wrong[:5])}")

    def swap(self, folder: Path) -> bool:
        return weights.swap(self._places, folder, self._ignored, used=self._named)

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

        hidden = embedding(padded, self._embedding).to(self.dtype)  # [prompts, T, hidden]
        for number, layer in enumerate(self._layers):
            query, key, value = self._project(layer, hidden, cos, sin)
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
            self._cache[number, 0, first:last, :, :longest] = key[owners]
            self._cache[number, 1, first:last, :, :longest] = value[owners]
            # Leftovers of an earlier sample are masked, but a masked NaN is still NaN.
            self._cache[number, :, first:last, :, longest:] = 0
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
        hidden = embedding(newest, self._embedding).to(self.dtype)  # [rows, hidden]
        for number, layer in enumerate(self._layers):
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

        hidden = embedding(padded, self._embedding).to(self.dtype)  # [rows, T, hidden]
        for number, layer in enumerate(self._layers):
            query, key, value = self._project(layer, hidden, cos, sin)
            keys, values = self._cache[number, 0, first:last], self._cache[number, 1, first:last]
            keys[everyone, :, places] = key
            values[everyone, :, places] = value
            mixed = scaled_dot_product_attention(
                query.transpose(1, 2), keys[:, :, :width], values[:, :, :width], attn_mask=mask, enable_gqa=True
            )
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
        return linear(self._normed(hidden, self._norm).float(), self._head)

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

    def _layer(self) -> Layer:
        shape = self._shape

        def matrix(outputs: Sequence[int], inputs: int) -> Matrix:
            return Matrix(outputs, inputs, self.device, self.dtype)

        queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
        return Layer(
            norm=self._empty(shape.hidden),
            qkv=matrix([queries, keys, keys], shape.hidden),
            qkv_bias=self._empty(queries + 2 * keys) if shape.biased else None,
            qk_norm=self._empty(shape.heads + shape.kv_heads, shape.head) if shape.normed else None,
            out=matrix([shape.hidden], queries),
            mlp_norm=self._empty(shape.hidden),
            gate_up=matrix([shape.intermediate] * 2, shape.hidden),
            down=matrix([shape.hidden], shape.intermediate),
        )

    def _named(self) -> dict[str, tuple[torch.Tensor, torch.Size]]:
        """Return the place of each tensor of the checkpoint, and its required shape."""
        shape = self._shape
        plain = {"model.embed_tokens": self._embedding, "model.norm": self._norm}
        if not shape.tied:
            plain["lm_head"] = self._head
        places = dict[str, tuple[torch.Tensor, torch.Size]]()
        for number, layer in enumerate(self._layers):
            prefix = f"model.layers.{number}."
            plain |= {f"{prefix}input_layernorm": layer.norm, f"{prefix}post_attention_layernorm": layer.mlp_norm}
            parts = {"self_attn.o_proj": layer.out.places()[0], "mlp.down_proj": layer.down.places()[0]}
            if layer.qk_norm is not None:  # one for all heads of a kind
                norms = torch.split(layer.qk_norm, [shape.heads, shape.kv_heads])
                parts |= zip(QK_NORMS, ((norm, norm.shape[1:]) for norm in norms), strict=True)
            parts |= zip(QKV, layer.qkv.places(), strict=True)
            parts |= zip(("mlp.gate_proj", "mlp.up_proj"), layer.gate_up.places(), strict=True)
            places |= {f"{prefix}{name}.weight": place for name, place in parts.items()}
            if layer.qkv_bias is not None:
                biases = torch.split(layer.qkv_bias, [size[0] for _, size in layer.qkv.places()])
                names = (f"{prefix}{name}.bias" for name in QKV)
                places |= zip(names, ((bias, bias.shape) for bias in biases), strict=True)
        return places | {f"{name}.weight": (tensor, tensor.shape) for name, tensor in plain.items()}
