"""What the sampling loop needs of a model: prompts in, rows that grow by a token, and rows that leave."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch


class Decoder(Protocol):
    """A model and the key-value cache of its rows; row r of any argument or answer is row r of the cache."""

    vocab_size: int
    positions_max: int
    parameters: int
    joins_midway: bool
    """Whether prompts may be let in while other rows are decoded."""
    device: torch.device
    dtype: torch.dtype

    def swap(self, folder: Path) -> bool:
        """Copy the weights of another version over these; False, and nothing copied, if its tensors are others.

        After an error the decoder must not be used.
        """

    def prefill(self, prompts: Sequence[Sequence[int]], copies: Sequence[int]) -> torch.Tensor:
        """Compute each prompt once, and append so many rows that begin with it; their next logits [rows, V]."""

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append a token [rows] to every row; the next logits [rows, V], in float32."""

    def move(self, sources: torch.Tensor, targets: torch.Tensor, rows: int) -> None:
        """Put some rows in the place of others, then keep the first so many."""

    def clear(self) -> None:
        """Forget all rows, and give their memory back."""
