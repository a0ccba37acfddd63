"""What the sampling loop needs of a model: prompts in, rows that grow by a token, and rows that leave."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Logits(Protocol):
    """What a model says may come next, for some rows; valid until the model's next step."""

    def draw(self, temperatures: Sequence[float], uniforms: Sequence[float]) -> tuple[list[int], list[float]]:
        """A token for each row, by `protocol.work.sampling`, and its log-probability at that temperature.

        The log-probability is NaN where the logits are no distribution; the token there means nothing.
        """

    def logprobs(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """The log-probability of this token in each row, at temperature 1."""


class Decoder(Protocol):
    """A model and the key-value cache of its rows; row r of any argument or answer is row r of the cache.

    Where memory does not suffice it raises whatever `Engine.is_out_of_memory` knows, and must be cleared then.
    """

    vocab_size: int
    positions_max: int
    parameters: int
    joins_midway: bool
    """Whether prompts may be let in while other rows are decoded."""
    numerics: str
    """What it computes with: engine/dtype/device, as in `coordinator/rules/tolerances.json`."""

    def swap(self, folder: Path) -> bool:
        """Copy the weights of another version over these; False, and nothing copied, if its tensors are others.

        After an error the decoder must not be used.
        """

    def prefill(self, prompts: Sequence[Sequence[int]], copies: Sequence[int]) -> Logits:
        """Compute each prompt once, and append so many rows that begin with it; what may come next in each."""

    def decode(self, tokens: Sequence[int]) -> Logits:
        """Append a token to every row; what may come next in each."""

    def move(self, sources: Sequence[int], targets: Sequence[int], rows: int) -> None:
        """Put some rows in the place of others, then keep the first so many."""

    def clear(self) -> None:
        """Forget all rows, so that fewer may find memory after a failure."""
