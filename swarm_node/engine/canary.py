"""The canary: after every load, a fixed text must get the log-probabilities that the publisher says.

- It finds weights in the wrong place, half of two versions, and kernels that keep an old copy. It does not find a
  version off by one small step: what has the right digest on disk is trusted to be the right version.
- Prefill and decoding are both tried: some prefixes of the text are rows of one prefill, and grow by one token.
- A folder without a canary is loaded unchecked: not every policy comes from our learner.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protocol.canary import FILE_NAME, Canary
from protocol.errors import EngineFailed
from swarm_node.engine.decoder import Decoder

Scores = Callable[[Sequence[int], Sequence[int]], NDArray[np.floating]]
"""What follows prefixes of a text, whose lengths are given: the log-probabilities [2, lengths] of the next token of
each, by prefill, and of the one after that, by decoding."""


def check(folder: Path, scores: Scores, *, vocab_size: int, tolerance_nats: float) -> None:
    """Refuse a model that does not give the folder's canary, on the mean."""
    file = folder / FILE_NAME
    if not file.exists():
        return
    canary = Canary.from_value(json.loads(file.read_bytes()))
    if (largest := max(canary.tokens)) >= vocab_size:
        raise EngineFailed(f"The canary in {folder} has token {largest}, the vocabulary only {vocab_size}.")
    lengths = np.array(_lengths(len(canary.tokens)))
    expected = np.array(canary.logprobs)[[lengths - 1, lengths]]
    error = float(np.abs(scores(canary.tokens, lengths.tolist()) - expected).mean())
    if not error <= tolerance_nats:  # NaN is none of both
        raise EngineFailed(
            f"The policy in {folder} does not give its canary: {error:.2g} nats off, {tolerance_nats:g} allowed.",
            hint="Its weights are damaged, or this engine reads them wrongly.",
        )


def score(decoder: Decoder, tokens: Sequence[int], lengths: Sequence[int]) -> NDArray[np.float32]:
    """A decoder's `Scores`."""
    decoder.clear()
    next_ones, later_ones = ([tokens[length + ahead] for length in lengths] for ahead in (0, 1))
    try:
        prefilled = decoder.prefill([tokens[:length] for length in lengths], [1] * len(lengths)).logprobs(next_ones)
        decoded = decoder.decode(next_ones).logprobs(later_ones)
    finally:
        decoder.clear()
    return np.stack([prefilled, decoded])


def _lengths(count: int) -> list[int]:
    """Each prefix twice as long as the one before, with two tokens left: few, since every swap waits."""
    return [1 << power for power in range((count - 2).bit_length())]
