"""The tensors of a Qwen3, Qwen2 or Llama as its products read them, and the names under which files hold them.

- Query, key and value are one product, gate and up another. The checkpoint's names lead to slices of the fused tensors,
  so the first load and every swap are the same copy into place.
- The head, and with tied weights the embedding, is kept in float32 in any dtype: rounded logits would cost more
  precision than all layers together.

`Matrix` stores weights in the order in which the products of a decoding step read them:

- The order is input by input: for the few rows of a step that is up to twice as fast as output by output.
- Large matrices are cut into contiguous tiles of outputs: the rows of a whole matrix are so far apart that a CPU reads
  each from another page, which costs a fifth of the time of products of up to 32 rows.
- Tiles are used only in float32 on a CPU: elsewhere libraries use their own layouts, and a matrix is one tile. So are
  small matrices.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from swarm_exact.shape import ModelShape

TILE_OUTPUTS = 256
"""The fastest of 128, 256 and 512."""

WHOLE_WEIGHTS_MAX = 2**18
"""1 MiB, which stays in a CPU cache: more tiles would only be more calls."""


class Matrix:
    """Several matrices with the same inputs, fused to one: [sum of outputs, inputs]."""

    def __init__(self, outputs: Sequence[int], inputs: int, device: torch.device, dtype: torch.dtype) -> None:
        self._outputs, self.inputs = outputs, inputs
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
        return [(part, torch.Size((size, self.inputs))) for part, size in zip(parts, self._outputs, strict=True)]


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


class PolicyWeights:
    """All tensors of one model."""

    def __init__(self, shape: ModelShape, device: torch.device, dtype: torch.dtype) -> None:
        self._shape, self._device, self._dtype = shape, device, dtype
        # Stored input by input, as products read it.
        self.head = self._empty(shape.hidden, shape.vocabulary, dtype=torch.float32).t()
        self.embedding = self.head if shape.tied else self._empty(shape.vocabulary, shape.hidden)
        self.norm = self._empty(shape.hidden)
        self.layers = [self._layer() for _ in range(shape.layers)]
        self.places = self.named()
        """The place and the required shape of each tensor, by its name in the checkpoint."""
        self.ignored = frozenset({"lm_head.weight"}) if shape.tied else frozenset[str]()

    @property
    def parameters(self) -> int:
        """Return the number of parameters."""
        return sum(size.numel() for _, size in self.places.values())

    def _empty(self, *sizes: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype or self._dtype, device=self._device)

    def _layer(self) -> Layer:
        shape = self._shape

        def matrix(outputs: Sequence[int], inputs: int) -> Matrix:
            return Matrix(outputs, inputs, self._device, self._dtype)

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

    def named(self) -> dict[str, tuple[torch.Tensor, torch.Size]]:
        """Return the place of each tensor of the checkpoint, and its required shape."""
        shape = self._shape
        plain = {"model.embed_tokens": self.embedding, "model.norm": self.norm}
        if not shape.tied:
            plain["lm_head"] = self.head
        places = dict[str, tuple[torch.Tensor, torch.Size]]()
        for number, layer in enumerate(self.layers):
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
