"""Logits, and what an honest node makes of them, without any model."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from coordinator.rules.calibration import Calibration, Limit, Tolerance
from coordinator.rules.replay import ReplayMeasurement, measure, score
from protocol.work.rollout import Completion
from protocol.work.sampling import uniforms

VOCABULARY = 50
EXACT = Tolerance(
    name="test/fp64/cpu",
    margin=Limit(tolerance=1e-3, rate=1e-4, far=0.05),
    error=Limit(tolerance=1e-3, rate=1e-4, far=0.05),
    mean_error=1e-4,
    positions=10**6,
)


def on_round(made: Calibration, round_id: str) -> Calibration:
    """Return these numbers as if they had been measured on the policy of this round."""
    classes = tuple(entry.model_copy(update={"round_id": round_id}) for entry in made.classes)
    return made.model_copy(update={"classes": classes})


@cache
def logits(count: int, *, seed: int = 0) -> NDArray[np.float64]:
    made = np.random.Generator(np.random.Philox(seed)).normal(0, 2, (count, VOCABULARY))
    made.flags.writeable = False  # all tests share it
    return made


def drawn(table: NDArray[np.float64], seed: int, number: int = 0, own: float | None = None) -> Completion:
    """Return the completion of an honest node with these logits, for a lease with a temperature of its own or not."""
    chances = uniforms(seed, number, len(table))
    tokens = score(table, chances, [0] * len(table), 1.0, own).dictated
    odds = np.exp(table - table.max(-1, keepdims=True))
    logprobs = np.log(odds[np.arange(len(table)), tokens] / odds.cumsum(-1)[:, -1])  # as `score` has them
    return Completion(tokens.astype(np.uint32), logprobs.astype(np.float32), "length")


def replayed(
    table: NDArray[np.float64], said: Completion, seed: int, number: int = 0, own: float | None = None
) -> ReplayMeasurement:
    """Return the measurement of an auditor with these logits."""
    scored = score(table, uniforms(seed, number, len(table)), said.tokens.tolist(), 1.0, own)
    return measure([said], [scored], [number])


def honest(
    count: int,
    *,
    noise: float = 0.0,
    seed: int = 1,
    shift: NDArray[np.float64] | None = None,
    own: float | None = None,
) -> ReplayMeasurement:
    """Positions of a node whose logits differ from the auditor's by noise and a shift."""
    table = logits(count)
    rough = table + noise * logits(count, seed=99) + (0 if shift is None else shift)
    return replayed(table, drawn(rough, seed, own=own), seed, own=own)
