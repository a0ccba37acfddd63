"""The canary: after every load, a fixed text must get the log-probabilities that the publisher says.

- It finds weights in the wrong place, half of two versions, and kernels that keep an old copy. It does not find a
  version off by one small step: what has the right digest on disk is trusted to be the right version.
- Prefill and decoding are both tried: every prefix of the text is a row of one prefill, and grows by one token.
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

Scores = Callable[[Sequence[int]], NDArray[np.floating]]
"""The log-probability of each token but the first [2, n - 1]: by prefill; and by decoding, from the third on."""


def check(folder: Path, scores: Scores, *, vocab_size: int, tolerance_nats: float) -> None:
    """Refuse a model that does not give the folder's canary, on the mean."""
    file = folder / FILE_NAME
    if not file.exists():
        return
    canary = Canary.from_value(json.loads(file.read_bytes()))
    if (largest := max(canary.tokens)) >= vocab_size:
        raise EngineFailed(f"The canary in {folder} has token {largest}, the vocabulary only {vocab_size}.")
    error = float(np.abs(scores(canary.tokens) - np.array(canary.logprobs)).mean())
    if not error <= tolerance_nats:  # NaN is none of both
        raise EngineFailed(
            f"The policy in {folder} does not give its canary: {error:.2g} nats off, {tolerance_nats:g} allowed.",
            hint="Its weights are damaged, or this engine reads them wrongly.",
        )


def score(decoder: Decoder, tokens: Sequence[int]) -> NDArray[np.float32]:
    """A decoder's `Scores`."""
    decoder.clear()
    later = tokens[1:]
    prefixes = [tokens[:length] for length in range(1, len(tokens))]
    try:
        prefilled = decoder.prefill(prefixes, [1] * len(prefixes)).logprobs(later)  # row r has seen r + 1 tokens
        decoded = decoder.decode(later).logprobs((*later[1:], later[0]))[:-1]  # row r has seen r + 2 tokens
    finally:
        decoder.clear()
    return np.stack([prefilled, np.concatenate([prefilled[:1], decoded])])
