"""Inverse CDF against Gumbel-max: how often noise of the logits changes the token, and what a token costs.

- Both are bound to the seed. The first takes one uniform per token; the second hashes one for every token of the
  vocabulary, and picks the largest of logit + Gumbel noise.
- The noise is real: the same hidden states through a head in float32, in bf16, and with weights in 8 bits; the heads
  are random, their spread chosen so that a distribution has about two nats, as language has.
- Costs are of whole batches of rows, from logits to tokens, on one thread, the two taking turns. Gumbel's hash is a
  splitmix64 per token, much cheaper than Philox.
"""

import math
import time
from collections.abc import Callable

import numpy as np
import torch

from bench.harness import Bench, no_options, quick_from_environment
from protocol.work.sampling import uniform_table

HIDDEN = 256
ENTROPY_NATS = 2.0
VOCABULARIES = {"1k": 1024, "32k": 32_000, "150k": 151_936}
ROWS_AT_ONCE = 32

_GOLDEN, _MIX = -7046029254386353131, (-4658895280553007687, -7723592293110705685)
"""splitmix64, as signed numbers."""


def inverse_cdf(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """`protocol.work.sampling.pick` for every row: [N, V], [N] → [N]."""
    cumulative = torch.softmax(logits, -1).double().cumsum(-1)
    return torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)[:, 0]


def gumbel_max(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw from noise per token; the uniform of the row is its key."""
    keys = (uniforms * 2.0**53).long()[:, None]  # [N, 1]
    words = keys + torch.arange(logits.shape[1]) * _GOLDEN  # [N, V]
    for shift, factor in zip((30, 27), _MIX, strict=True):
        words = (words ^ (words >> shift & (1 << 64 - shift) - 1)) * factor
    chances = ((words ^ (words >> 31 & (1 << 33) - 1)) >> 11 & (1 << 53) - 1).double().add_(0.5).mul_(2.0**-53)
    return (logits - torch.log(-torch.log(chances)).float()).argmax(-1)


def numpy_inverse_cdf(logits: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    odds = np.exp(logits - logits.max(-1, keepdims=True))
    cumulative = odds.cumsum(-1, dtype=np.float64)
    tokens: np.ndarray = (cumulative <= uniforms[:, None] * cumulative[:, -1:]).sum(-1)
    return tokens


def numpy_gumbel_max(logits: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    words = (uniforms * 2.0**53).astype(np.uint64)[:, None] + np.arange(logits.shape[1], dtype=np.uint64) * np.uint64(
        _GOLDEN % 2**64
    )
    for shift, factor in zip((30, 27), _MIX, strict=True):
        words = (words ^ words >> np.uint64(shift)) * np.uint64(factor % 2**64)
    chances = ((words ^ words >> np.uint64(31)) >> np.uint64(11)).astype(np.float64)
    noise = -np.log(-np.log((chances + 0.5) * 2.0**-53))
    tokens: np.ndarray = (logits + noise).argmax(-1)
    return tokens


class Head:
    """Hidden states, and the same head in three precisions."""

    def __init__(self, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(vocabulary)
        # Logits of deviation s take s²/2 off the entropy of the uniform distribution.
        spread = math.sqrt(2 * (math.log(vocabulary) - ENTROPY_NATS))
        self._generator = generator
        self._weight = torch.randn(vocabulary, HIDDEN, generator=generator) * spread / math.sqrt(HIDDEN)
        scale = self._weight.abs().amax(1, keepdim=True) / 127
        self._coarse = (self._weight / scale).round() * scale

    def states(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, HIDDEN, generator=self._generator)

    def logits(self, states: torch.Tensor, precision: str) -> torch.Tensor:
        if precision == "bf16":
            return (states.bfloat16() @ self._weight.bfloat16().T).float()
        return states @ (self._coarse if precision == "int8" else self._weight).T


def diverged(head: Head, pick: Callable[..., torch.Tensor], rows: int, precision: str) -> float:
    """The share of tokens that differ from those of float32."""
    different = 0
    for start in range(0, rows, ROWS_AT_ONCE):
        states = head.states(ROWS_AT_ONCE)
        uniforms = torch.from_numpy(uniform_table([start] * ROWS_AT_ONCE, list(range(ROWS_AT_ONCE)), 1)[:, 0])
        exact, rough = (pick(head.logits(states, kind), uniforms) for kind in ("float32", precision))
        different += int((exact != rough).sum())
    return different / rows


def microseconds_per_token(pick: Callable[..., object], logits: object, uniforms: object) -> float:
    began = time.perf_counter()
    pick(logits, uniforms)
    return 1e6 * (time.perf_counter() - began) / ROWS_AT_ONCE


ON_TORCH = {"inverse CDF": inverse_cdf, "Gumbel": gumbel_max}
ON_NUMPY = {"inverse CDF": numpy_inverse_cdf, "Gumbel": numpy_gumbel_max}


def main() -> int:
    """Measure, print and judge."""
    no_options(__doc__)
    quick = quick_from_environment()
    torch.set_num_threads(1)
    rounds, scale = (3, 8) if quick else (7, 1)
    bench = Bench("sampling", inputs={"rounds": rounds, "entropy_nats": ENTROPY_NATS, "hidden": HIDDEN}, quick=quick)
    for name, vocabulary in VOCABULARIES.items():
        head = Head(vocabulary)
        rows = ROWS_AT_ONCE * (32 if vocabulary > 100_000 else 256) // scale
        for precision in ("bf16", "int8"):
            for way, pick in ON_TORCH.items():
                share = diverged(head, pick, rows, precision)
                bench.measure(f"{name}, {precision} noise, {way}: tokens changed", 100 * share, unit="%")
        logits = head.logits(head.states(ROWS_AT_ONCE), "float32")
        chances = torch.rand(ROWS_AT_ONCE, dtype=torch.float64)
        for _ in range(rounds):
            for way, pick in ON_TORCH.items():
                bench.measure(f"{name}, torch: {way}", microseconds_per_token(pick, logits, chances), unit="µs/token")
            for way, pick_too in ON_NUMPY.items():
                cost = microseconds_per_token(pick_too, logits.numpy(), chances.numpy())
                bench.measure(f"{name}, numpy: {way}", cost, unit="µs/token")
        for library in ("torch", "numpy"):
            cases = [f"{name}, {library}: {way}" for way in ON_TORCH]
            bench.ratio(f"{name}, {library}: Gumbel / inverse CDF", cases[1], cases[0])
    dearer = bench.ratio("cost", "150k, torch: Gumbel", "150k, torch: inverse CDF")
    bench.goal("inverse CDF is cheaper at 150k tokens on torch", dearer, at_least=1.0)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
