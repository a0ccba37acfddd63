"""Weights in the type in which a policy holds them: rounded to bfloat16 with a dither, and merged with an adapter.

The learner publishes weights so, and nodes and auditors merge adapters so: `protocol.policy` defines both.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from protocol.policy import adapter
from protocol.policy.rounding import CUT, PIECE, pieces, thresholds

CARD_PIECE = 1 << 24
"""The numbers that a card rounds at once: enough to fill it, and few enough for its memory."""

Rounding = Callable[[str, torch.Tensor, int], torch.Tensor]
"""Returns a weight of that name, or its rows from that row on, in bfloat16."""


def dithered(name: str, rows: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Return a weight, or its rows from row `first` on, in bfloat16; see `protocol.policy.rounding`."""
    table = rows.float().contiguous().view(len(rows), math.prod(rows.shape[1:]))
    result = torch.empty_like(table, dtype=torch.bfloat16)
    (count, width), device = table.shape, table.device
    at_once = PIECE if device.type == "cpu" else CARD_PIECE
    of_rows, of_columns = (torch.from_numpy(part).to(device) for part in thresholds(name, first, count, width))
    for piece in pieces(count, width, at_once):
        numbers = table[piece]
        bits = (of_rows[piece[0], None] + of_columns[piece[1]]).bitwise_and_(CUT)
        bits.add_(numbers.view(torch.int32)).bitwise_and_(~CUT)
        result[piece] = torch.where(numbers.isfinite(), bits.view(torch.float32), numbers)
    return result.view(rows.shape)


def nearest(_: str, rows: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Return a weight in bfloat16 to the nearest, which needs no numbers: for simulations of memory."""
    return rows.to(torch.bfloat16)


def narrowed(
    name: str, rows: torch.Tensor, dtype: torch.dtype, first: int = 0, rounding: Rounding = dithered
) -> torch.Tensor:
    """Return a weight, or its rows from row `first` on, in the type in which it is published."""
    return rounding(name, rows, first) if dtype == torch.bfloat16 else rows.to(dtype)


def merged(
    name: str,
    weight: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    scale: float,
    first: int = 0,
    rounding: Rounding = dithered,
) -> torch.Tensor:
    """Return W' = W + scale · B A in the type of W: a whole weight, or its rows from row `first` on.

    `name` is the weight's in the files of the policy.
    """
    learned = up.float() @ down.float()
    torch.add(weight.float(), learned, alpha=scale, out=learned)
    return narrowed(name, learned, weight.dtype, first, rounding)


@contextmanager
def without_adapter(folder: Path) -> Iterator[Path]:
    """Yield the folder without its adapter, for libraries that would apply the adapter themselves."""
    if not (folder / adapter.CONFIG).exists():
        yield folder
        return
    with TemporaryDirectory(prefix="echo-swarm-") as scratch:
        for file in folder.iterdir():
            if file.name not in adapter.FILES:
                (Path(scratch) / file.name).symlink_to(file.absolute())
        yield Path(scratch)
