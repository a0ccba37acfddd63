"""The canary: after a load, a fixed text must get the log-probabilities that the publisher states.

- It detects weights in the wrong place, and layers or kernels that keep the weights of a distant version. It does not
  detect those of a near one: SmolLM2 in bf16 16 updates of 1e-5 ago is within the noise of rounding. Files with the
  right digest are trusted to be the right version.
- It tests both prefill and decoding: prefixes of the text are rows of one prefill, and grow token by token until
  together they cover it.
- A swap that compares its tensors with the files leaves only the numbers to be checked: the model itself reproduced a
  whole canary when it was built. In float32, one prefix then suffices, since noise is far below the tolerance.
- A folder without a canary is loaded unchecked: not every policy comes from our learner.
"""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protocol.errors import EngineFailed
from protocol.policy.canary import AHEAD, FILE_NAME, FIRST_JUDGED, Canary
from swarm_node.engine.decoder import Decoder

FLOAT32 = "fp32"
"""The name of float32 in a class of numerics."""

Scores = Callable[[Sequence[int], Sequence[int]], NDArray[np.floating]]
"""Maps a text and the lengths of some of its prefixes to the log-probabilities [tokens, lengths] of the tokens after
each prefix: the first token by prefill, the others by decoding. At most `AHEAD` tokens, or as many as follow the
longest prefix."""


def check(folder: Path, scores: Scores, *, vocab_size: int, numerics: str, is_proven: bool = False) -> bool:
    """Raise an error if the mean distance to the folder's canary is more than the model's precision explains.

    `is_proven` says that a check of this model returned True before, and that this swap compared its tensors. Return
    True if the canary judges at least `AHEAD` tokens; False if it judges fewer, or if the folder has none.
    """
    file = folder / FILE_NAME
    if not file.exists():
        return False
    canary = Canary.from_value(json.loads(file.read_bytes()))
    if (largest := max(canary.tokens)) >= vocab_size:
        raise EngineFailed(f"The canary in {folder} has token {largest}, the vocabulary only {vocab_size}.")
    precision = numerics.split("/")[1]
    lengths = np.array(canary.prefixes[:1] if is_proven and precision == FLOAT32 else canary.prefixes)
    expected = np.array(canary.logprobs)[[lengths - 1 + ahead for ahead in range(canary.ahead)]]
    error = float(np.abs(scores(canary.tokens, lengths.tolist()) - expected).mean())
    tolerance_nats = canary.tolerance_nats(precision)
    if not error <= tolerance_nats:  # also true for NaN
        raise EngineFailed(
            f"The policy in {folder} does not give its canary: {error:.2g} nats off, {tolerance_nats:.2g} allowed in "
            f"{precision}.",
            hint="The weights are damaged, or this engine reads them incorrectly.",
        )
    return len(canary.tokens) >= FIRST_JUDGED + AHEAD


def score(decoder: Decoder, tokens: Sequence[int], lengths: Sequence[int]) -> NDArray[np.float32]:
    """Return the `Scores` of a decoder."""
    decoder.clear()
    following = [[tokens[length + ahead] for length in lengths] for ahead in range(count_ahead(tokens, lengths))]
    try:
        logits = decoder.prefill([tokens[:length] for length in lengths], [1] * len(lengths))
        rows = [logits.logprobs(following[0])]
        for drawn, wanted in pairwise(following):
            rows.append(decoder.decode(drawn).logprobs(wanted))
    finally:
        decoder.clear()
    return np.stack(rows)


def count_ahead(tokens: Sequence[int], lengths: Sequence[int]) -> int:
    """Return the number of tokens scored after each prefix."""
    return min(AHEAD, len(tokens) - max(lengths))
