"""A matrix of weights, laid out as the products of a decoding step read it.

- It lies input by input: for the few rows of a step that is up to twice as fast as output by output.
- Large ones are cut into tiles of outputs, each of one piece: the rows of a whole one lie so far apart that a processor
  reads each from another page, which costs a fifth of the products of up to 32 rows.
- Only in float32 on a CPU: elsewhere products have layouts of their own, and a matrix is one tile, as small ones are.
"""

from collections.abc import Sequence

import torch

TILE_OUTPUTS = 256
"""Of 128, 256 and 512 the fastest."""

WHOLE_WEIGHTS_MAX = 2**18
"""Of 1 MiB, which stays in a processor's cache: more tiles would only be more calls."""


class Matrix:
    """Several matrices of the same inputs as one: [outputs of them all, inputs]."""

    def __init__(self, outputs: Sequence[int], inputs: int, device: torch.device, dtype: torch.dtype) -> None:
        self._outputs, self._inputs = outputs, inputs
        whole = width = sum(outputs)
        large = device.type == "cpu" and dtype == torch.float32 and whole * inputs > WHOLE_WEIGHTS_MAX
        if large and not any(size % TILE_OUTPUTS for size in outputs):
            width = TILE_OUTPUTS
        self.tiles = whole // width
        self._weights = torch.empty(self.tiles, inputs, width, device=device, dtype=dtype)

    def times(self, values: torch.Tensor) -> torch.Tensor:
        """[..., inputs] to [..., outputs]."""
        if self.tiles == 1:
            return values @ self._weights[0]
        rows = values.flatten(0, -2)
        products = rows.new_empty(len(rows), self.tiles, TILE_OUTPUTS)
        torch.bmm(rows.expand(self.tiles, -1, -1), self._weights, out=products.transpose(0, 1))
        return products.view(*values.shape[:-1], self.tiles * TILE_OUTPUTS)

    def places(self) -> list[tuple[torch.Tensor, torch.Size]]:
        """Where each of the matrices belongs, and the shape that it has elsewhere."""
        if self.tiles == 1:
            parts = torch.split(self._weights[0].t(), list(self._outputs))
        else:
            parts = torch.split(self._weights.mT, [size // TILE_OUTPUTS for size in self._outputs])
        return [(part, torch.Size((size, self._inputs))) for part, size in zip(parts, self._outputs, strict=True)]
