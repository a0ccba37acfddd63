"""Interface between the sampling loop and a model: prefill prompts, append one token per row, remove rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

OwnTemperatures = Sequence[float | None]
"""The temperature at which each row is drawn, where it has one of its own; empty if no row has."""


class Logits(Protocol):
    """Next-token logits of some rows; valid until the model's next step."""

    def draw(
        self, temperatures: Sequence[float], uniforms: Sequence[float], own: OwnTemperatures = ()
    ) -> tuple[list[int], list[float]]:
        """Draw a token for each row, by `protocol.work.sampling`; also return its log-probability at `temperatures`.

        A row with a temperature in `own` is drawn at that one. The log-probability is NaN where the logits are no
        distribution; the token is then meaningless.
        """

    def logprobs(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the log-probability of the given token in each row, at temperature 1."""


@dataclass(frozen=True)
class SavedRow:
    """A copy of the keys and values of one row."""

    values: Any
    """The row in the decoder's own form."""
    length: int
    """Number of tokens in the row."""
    size_bytes: int


class Decoder(Protocol):
    """A model and the key-value cache of its rows; row r of any argument or result is row r of the cache.

    Out of memory, it raises an error that `Engine.is_out_of_memory` recognises, and must be cleared.
    """

    vocab_size: int
    positions_max: int
    parameters: int
    joins_midway: bool
    """True if prompts may be added while other rows are decoded."""
    numerics: str
    """Class of numerics: engine/dtype/device, as in `coordinator/rules/tolerances.json`."""

    def swap(self, folder: Path) -> bool:
        """Copy the weights of another version over these; return False, and copy nothing, if its tensors differ.

        After an error the decoder must not be used.
        """

    def prefill(self, prompts: Sequence[Sequence[int]], copies: Sequence[int]) -> Logits:
        """Compute each prompt once, and append `copies` rows that begin with it; return the logits of the new rows."""

    def decode(self, tokens: Sequence[int]) -> Logits:
        """Append a token to every row; return the logits of each row."""

    def move(self, sources: Sequence[int], targets: Sequence[int], rows: int) -> None:
        """Copy the rows `sources` to `targets`, then keep the first `rows`."""

    def save(self, row: int) -> SavedRow | None:
        """Return a copy of a row, for `resume` under the same weights; None if it cannot be copied now, or ever."""

    def resume(self, saved: Sequence[SavedRow], texts: Sequence[Sequence[int]]) -> Logits:
        """Append rows with these texts, of which `saved` holds the beginnings; return the logits of the new rows."""

    def clear(self) -> None:
        """Drop all rows, so that fewer rows fit into memory after a failure."""
