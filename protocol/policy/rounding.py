"""Rounding of weights to bfloat16 with a fixed dither, so that small steps are published.

- A bfloat16 of about 0.05 changes in steps of 2.4e-4. A pretrained weight lies on such a step: rounded to the nearest,
  it is published unchanged until it has moved by half a step, a dozen updates at a learning rate of 1e-5. Nodes would
  sample from a policy that does not learn.
- Here each weight has a threshold of 16 bits, and is rounded away from zero if the 16 bits that are cut off reach it.
  Over many weights the mean error is zero, so a version is as far from the start as the trained policy.
- Thresholds never change, so a weight that did not move has the same bytes in the next version, and patches stay small.
  A threshold follows from the weight's name, row and column, so all who round agree.

The threshold is the sum modulo 2^16 of the row's and the column's. It is added to the bits of the weight in float32, of
which the upper 16 are the weight in bfloat16. All arithmetic is of unsigned 64-bit numbers, p a row or a column from 0,
c the CRC-32 of the tensor's name; a tensor of more dimensions is a table of its first by all others:

    row p      mixed(p, c)
    column p   mixed(p, 0xFFFFFFFF - c)

    mixed(p, s):  z = (p + 65537 * s) * 0x9E3779B97F4A7C15
                  m = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
                  return ((m ^ (m >> 27)) >> 24) & 0xFFFF

With the name `model.norm.weight`, the rows 0 to 2 have 40642, 63155 and 55296, and column 0 has 10205.
"""

import math
import zlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

CUT_BITS = 16
"""The bits of float32 that bfloat16 lacks."""

CUT = (1 << CUT_BITS) - 1

PIECE = 1 << 16
"""The numbers that are rounded at once: few enough for a processor's cache."""

_SEED_MAX = 0xFFFFFFFF

Array = NDArray[np.int32]


def thresholds(name: str, first: int, count: int, width: int) -> tuple[Array, Array]:
    """Return the thresholds of `count` rows from row `first` on, and those of `width` columns.

    The threshold of a weight is the sum of its row's and its column's, in 16 bits. `name` is that of the tensor.
    """
    seed = zlib.crc32(name.encode())
    return _mixed(first, count, seed), _mixed(0, width, _SEED_MAX - seed)


def pieces(count: int, width: int, at_once: int = PIECE) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and columns of pieces of a table, in the order of the table: some whole rows, or a part of one."""
    height = max(1, at_once // max(1, width))
    for top in range(0, count, height):
        for left in range(0, width, at_once):
            yield slice(top, min(top + height, count)), slice(left, min(left + at_once, width))


def dithered(name: str, values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return a whole tensor in bfloat16."""
    table = values.reshape(len(values), math.prod(values.shape[1:]))
    rows, columns = thresholds(name, 0, *table.shape)
    result = np.empty(table.shape, "<u2")
    for places in pieces(*table.shape):
        result[places] = rounded(table[places], rows[places[0]], columns[places[1]])
    return result.reshape(values.shape)


def rounded(table: NDArray[np.float32], rows: Array, columns: Array) -> NDArray[np.uint16]:
    """Return a piece of a tensor in bfloat16, given the thresholds of its rows and columns."""
    bits = np.ascontiguousarray(table, "<f4").view("<u4")
    added = (rows[:, None] + columns).view("<u4") & np.uint32(CUT)
    result: NDArray[np.uint16] = ((bits + added) >> np.uint32(CUT_BITS)).astype(np.uint16)
    finite = np.isfinite(table)
    if not finite.all():  # infinity stays; NaN stays one, whatever its upper bits are
        np.copyto(result, (bits >> np.uint32(CUT_BITS)).astype(np.uint16) | np.isnan(table), where=~finite)
    return result


def _mixed(first: int, count: int, seed: int) -> Array:
    """Return numbers of 16 bits that look random, one for each position from `first` on (a hash after splitmix64)."""
    numbers = np.arange(first, first + count, dtype=np.uint64) + np.uint64(seed * 0x10001)
    numbers *= np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) >> np.uint64(24)
    return (numbers & np.uint64(CUT)).astype(np.int32)
