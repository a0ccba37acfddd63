"""Rounding of trained weights to bfloat16 with a fixed dither, so that small steps are published.

- A bfloat16 of about 0.05 changes in steps of 2.4e-4. A pretrained weight lies on such a step: rounded to the nearest,
  it is published unchanged until it has moved by half a step, a dozen updates at a learning rate of 1e-5. Nodes would
  sample from a policy that does not learn.
- Here each weight has a threshold between 0 and 1, and is rounded up if the part that is cut off exceeds it. Over many
  weights the mean error is zero, so a version is as far from the start as the trained policy.
- Thresholds never change, so a weight that did not move has the same bytes in the next version, and patches stay small.
  A threshold follows from the weight's name, row and column, so ranks agree.
"""

import math
import zlib
from collections.abc import Iterator

import torch

CUT_BITS = 16
"""The bits of float32 that bfloat16 lacks."""

CUT = (1 << CUT_BITS) - 1

PIECE = 1 << 16
"""The numbers that are rounded at once: few enough for a processor's cache, and for a card's memory."""


def dithered(name: str, rows: torch.Tensor, places: slice) -> torch.Tensor:
    """Return some rows of a weight in bfloat16; `places` are their positions in the whole weight."""
    table = rows.contiguous().view(len(rows), math.prod(rows.shape[1:]))
    result = torch.empty_like(table, dtype=torch.bfloat16)
    of_rows, of_columns = _thresholds(table, zlib.crc32(name.encode()), places.start)
    for piece in _pieces(table):
        numbers = table[piece]
        if not bool(numbers.isfinite().all()):
            result[piece] = numbers.to(torch.bfloat16)
            continue
        bits = (of_rows[piece[0], None] + of_columns[piece[1]]).bitwise_and_(CUT)
        bits.add_(numbers.view(torch.int32)).bitwise_and_(~CUT)
        result[piece] = bits.view(torch.float32)
    return result.view(rows.shape)


def _pieces(table: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the positions of pieces of a table, which together are the table."""
    count, width = table.shape
    height = max(1, PIECE // max(1, width))
    for top in range(0, count, height):
        for left in range(0, width, PIECE):
            yield slice(top, top + height), slice(left, left + PIECE)


def _thresholds(table: torch.Tensor, seed: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers of `CUT_BITS` bits for each row and each column: a weight's threshold is the sum of its two."""
    count, width = table.shape
    return _mixed(first, count, seed, table.device), _mixed(0, width, ~seed, table.device)


def _mixed(first: int, count: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return numbers that look random, one for each position from `first` on (a hash after splitmix64)."""
    numbers = torch.arange(first, first + count, dtype=torch.int64, device=device)
    numbers = (numbers + seed * 0x10001) * -0x61C8864680B583EB
    numbers = (numbers ^ (numbers >> 30)) * -0x40A7B892E31B1A47
    return ((numbers ^ (numbers >> 27)) >> 24).bitwise_and_(CUT).to(torch.int32)
