"""Seed-bound sampling: a lease's seed determines the token that every engine picks, given the same probabilities.

- The randomness of a token is a pure function of (seed, sample, position): no engine keeps a generator, a lease
  split over batches or retried elsewhere draws the same numbers, and an auditor can draw them again.
- Position p takes word p mod 4 of the Philox4x64-10 block with key (seed, sample) and counter p div 4 + 1, which is
  also the p-th raw word of `numpy.random.Philox(key=[seed, sample])`. Its upper 53 bits are the uniform in [0, 1).
- The token is the first, in token-id order, whose cumulative probability (summed in float64) exceeds the uniform times
  the total. A token of probability zero is never picked.
- Any change changes the meaning of every lease: golden vectors in the tests freeze the algorithm.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from protocol.errors import NonFiniteNumber

_MULTIPLIERS = (np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157))
_KEY_STEPS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B))
_ROUNDS = 10
_LOW_HALF = np.uint64(0xFFFFFFFF)
_HALF_BITS = np.uint64(32)

Words = NDArray[np.uint64]


def uniforms(seed: int, sample: int, count: int) -> NDArray[np.float64]:
    """Return the uniforms of positions 0 … count-1 of one sample."""
    row: NDArray[np.float64] = uniform_table([seed], [sample], count)[0]
    return row


def uniform_table(seeds: Sequence[int], samples: Sequence[int], count: int) -> NDArray[np.float64]:
    """Return the uniforms of (seeds[r], samples[r]) in row r, for positions 0 … count-1: shape [rows, count]."""
    rows, blocks = len(seeds), -(-count // 4)
    counter = np.arange(1, blocks + 1, dtype=np.uint64)
    words = [np.tile(counter, (rows, 1)), *(np.zeros((rows, blocks), np.uint64) for _ in range(3))]
    keys = [np.array(part, dtype=np.uint64).reshape(rows, 1) for part in (seeds, samples)]
    raw = np.stack(_philox(words, keys), axis=-1).reshape(rows, blocks * 4)[:, :count]  # [rows, count]
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


def pick(probabilities: NDArray[np.floating], uniform: float) -> int:
    """Return the token that a uniform selects from a row of probabilities, which need not sum to exactly one."""
    # Methods, not numpy's functions of the same names, whose wrappers took most of the time.
    cumulative = probabilities.cumsum(dtype=np.float64)
    total = float(cumulative[-1])
    if not (math.isfinite(total) and total > 0):
        raise NonFiniteNumber("These probabilities do not add up to a positive number.")
    # Rounding may lift uniform x total to the total itself, above every token.
    target = min(uniform * total, math.nextafter(total, 0.0))
    return int(cumulative.searchsorted(target, side="right"))


def _philox(words: list[Words], keys: list[Words]) -> list[Words]:
    """Compute Philox4x64 with ten rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3")."""
    for turn in range(_ROUNDS):
        if turn:
            keys = [key + step for key, step in zip(keys, _KEY_STEPS, strict=True)]
        high0, low0 = _multiply(words[0], _MULTIPLIERS[0])
        high1, low1 = _multiply(words[2], _MULTIPLIERS[1])
        words = [high1 ^ words[1] ^ keys[0], low1, high0 ^ words[3] ^ keys[1], low0]
    return words


def _multiply(left: Words, right: np.uint64) -> tuple[Words, Words]:
    """Return the high and the low 64 bits of a 128-bit product, from 32-bit halves: numpy has no wider integer."""
    left_high, left_low = left >> _HALF_BITS, left & _LOW_HALF
    right_high, right_low = right >> _HALF_BITS, right & _LOW_HALF
    cross = left_high * right_low
    middle = (left_low * right_low >> _HALF_BITS) + (cross & _LOW_HALF) + left_low * right_high
    return left_high * right_high + (cross >> _HALF_BITS) + (middle >> _HALF_BITS), left * right
