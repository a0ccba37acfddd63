"""The canary: after every load, a fixed text must get the log-probabilities that the publisher says.

- It finds weights in the wrong place, half of two versions, and kernels that keep an old copy. It does not find a
  version off by one small step: what has the right digest on disk is trusted to be the right version.
- Prefill and decoding are both tried: every prefix of the text is a row of one prefill, and grows by one token.
- A folder without a canary is loaded unchecked: not every policy comes from our learner.
"""

import json
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.canary import FILE_NAME, Canary
from protocol.errors import EngineFailed
from swarm_node.engine.decoder import Decoder

TOLERANCE_NATS = {torch.float32: 1e-3, torch.bfloat16: 0.15}
"""Mean error allowed. Measured on sound weights: 2e-6 at worst in float32, 4e-2 in bf16. In an untrained model of two
layers, one projection scaled by a tenth gives 8e-3, keys in the place of queries 0.16: bf16 shows only the grossest."""


def check(decoder: Decoder, folder: Path) -> None:
    """Refuse a decoder that does not give the folder's canary."""
    if canary := read(folder, decoder.vocab_size):
        off = score(decoder, canary.tokens) - torch.tensor(canary.logprobs)
        judge(folder, off.numpy(), TOLERANCE_NATS[decoder.dtype])


def read(folder: Path, vocab_size: int) -> Canary | None:
    """The folder's canary, if it has one."""
    file = folder / FILE_NAME
    if not file.exists():
        return None
    canary = Canary.from_value(json.loads(file.read_bytes()))
    if (largest := max(canary.tokens)) >= vocab_size:
        raise EngineFailed(f"The canary in {folder} has token {largest}, the vocabulary only {vocab_size}.")
    return canary


def judge(folder: Path, off: NDArray[np.floating], tolerance: float) -> None:
    """Refuse log-probabilities that are too far off the canary's, on the mean."""
    error = float(np.abs(off).mean())
    if not error <= tolerance:  # NaN is none of both
        raise EngineFailed(
            f"The policy in {folder} does not give its canary: {error:.2g} nats off, {tolerance:g} allowed.",
            hint="Its weights are damaged, or this engine reads them wrongly.",
        )


def score(decoder: Decoder, tokens: tuple[int, ...]) -> torch.Tensor:
    """The log-probability of each token but the first [2, n - 1]: by prefill; and by decoding, from the third on."""
    decoder.clear()
    text = torch.tensor(tokens, device=decoder.device)
    prefixes = [tokens[:length] for length in range(1, len(tokens))]
    try:
        prefilled = decoder.prefill(prefixes, [1] * len(prefixes))  # row r has seen r + 1 tokens
        decoded = decoder.decode(text[1:])  # row r has seen r + 2 tokens
    finally:
        decoder.clear()
    first = _logprobs(prefilled, text[1:])
    return torch.stack([first, torch.cat([first[:1], _logprobs(decoded[:-1], text[2:])])]).cpu()


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None])[:, 0]
