"""`protocol.work.sampling` on the raw logits of llama.cpp, in numpy: a token for each row, and its log-probability.

- The token is the same as `pick`'s, bit for bit, at half the cost: sums over parts of the vocabulary locate it, and
  only one part is summed token by token. Where rounding could make a difference, `pick` itself decides.
- Rows are processed a few at a time, so that a large vocabulary stays in the CPU cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.work.sampling import pick

BLOCK_VALUES = 2**18
"""Logits processed at once: 1 MiB."""

PART = 512
"""Tokens per part of the vocabulary; about the square root of a large vocabulary."""

DOUBT = 1e-9
"""Share of the total: far more than the order of summing a million float64 can change."""


@dataclass(frozen=True)
class NumpyLogits:
    """`Logits` in numpy: [rows, V], in float32."""

    values: NDArray[np.float32]

    def draw(self, temperatures: Sequence[float], uniforms: Sequence[float]) -> tuple[list[int], list[float]]:
        step = max(1, BLOCK_VALUES // self.values.shape[1])
        tokens: list[int] = []
        logprobs: list[float] = []
        for first in range(0, len(self.values), step):
            rows = slice(first, first + step)
            drawn = _draw(self.values[rows], np.array(temperatures[rows], np.float32), uniforms[rows])
            tokens += drawn[0]
            logprobs += drawn[1]
        return tokens, logprobs

    def logprobs(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        shifted = self.values - self.values.max(-1, keepdims=True)
        totals = np.exp(shifted).sum(-1, dtype=np.float64)
        scores: NDArray[np.float32] = (shifted[np.arange(len(tokens)), tokens] - np.log(totals)).astype(np.float32)
        return scores


@np.errstate(invalid="ignore")  # infinite logits become NaN, which is reported
def _draw(
    logits: NDArray[np.float32], temperatures: NDArray[np.float32], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    rows, vocabulary = logits.shape
    scores = logits if (temperatures == 1).all() else logits / temperatures[:, None]
    scores = scores - scores.max(-1, keepdims=True)
    weights = np.zeros((rows, -(-vocabulary // PART), PART), np.float32)  # padding of the last part is never drawn
    flat = weights.reshape(rows, -1)
    np.exp(scores, out=flat[:, :vocabulary])
    sums = weights.sum(-1, dtype=np.float64).cumsum(-1)  # [rows, parts]
    drawn = [_search(*row) for row in zip(flat, weights, sums, uniforms, strict=True)]
    places = (np.arange(rows), drawn)
    logprobs = np.minimum(scores[places] - np.log(sums[:, -1]), 0.0).astype(np.float32)  # rounding may exceed 0
    return drawn, logprobs.tolist()


def _search(flat: NDArray[np.float32], parts: NDArray[np.float32], sums: NDArray[np.float64], uniform: float) -> int:
    """Return the token of one row; 0 if its weights are no distribution."""
    total = float(sums[-1])
    if not np.isfinite(total):
        return 0
    target = uniform * total
    part = min(int(sums.searchsorted(target, "right")), len(sums) - 1)
    before = float(sums[part - 1]) if part else 0.0
    inner = parts[part].cumsum(dtype=np.float64) + before
    place = int(inner.searchsorted(target, "right"))
    lower = float(inner[place - 1]) if place else before
    if place == PART or min(target - lower, float(inner[place]) - target) < DOUBT * total:
        return pick(flat, uniform)
    return part * PART + place
