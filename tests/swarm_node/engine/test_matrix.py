"""A matrix in tiles multiplies as a whole one does."""

import pytest
import torch

from swarm_exact.matrices import TILE_OUTPUTS, Matrix

CPU = torch.device("cpu")
INPUTS = 512


def filled(outputs: list[int], dtype: torch.dtype) -> tuple[Matrix, torch.Tensor]:
    """A matrix, and the same as torch has it: [outputs, inputs]."""
    matrix, parts = Matrix(outputs, INPUTS, CPU, dtype), []
    for (place, shape), size in zip(matrix.places(), outputs, strict=True):
        assert shape == (size, INPUTS)
        part = torch.randn(shape, generator=torch.Generator().manual_seed(size), dtype=dtype)
        place.copy_(part.view(place.shape))
        parts.append(part)
    return matrix, torch.cat(parts)


@pytest.mark.parametrize(
    ("outputs", "tiles"),
    [
        ([TILE_OUTPUTS * 2], 1),  # just small enough
        ([TILE_OUTPUTS * 3], 3),
        ([TILE_OUTPUTS * 2, TILE_OUTPUTS, TILE_OUTPUTS], 4),
        ([TILE_OUTPUTS * 2, TILE_OUTPUTS - 1], 1),  # a tile would hold some of both
    ],
)
@pytest.mark.parametrize("rows", [(1,), (3,), (2, 5), (0,)], ids=str)
def test_products_are_those_of_the_whole_matrix(outputs: list[int], tiles: int, rows: tuple[int, ...]) -> None:
    matrix, whole = filled(outputs, torch.float32)
    values = torch.randn(*rows, INPUTS)
    assert matrix.tiles == tiles
    torch.testing.assert_close(matrix.times(values), values @ whole.t(), atol=1e-4, rtol=1e-4)


def test_bf16_stays_whole() -> None:
    matrix, whole = filled([TILE_OUTPUTS] * 4, torch.bfloat16)
    values = torch.randn(3, INPUTS, dtype=torch.bfloat16)
    assert matrix.tiles == 1
    torch.testing.assert_close(matrix.times(values), values @ whole.t())
