"""The canary of a policy version: a short text, and how likely each of its tokens is.

- It is a file of the policy folder, so the manifest binds it like any other.
- The publisher computes it from the weights as they are published; an engine that loads them must come to the same.
- The tokens mean nothing: they are spread over the vocabulary, and unlikely, which makes errors show.
"""

from typing import Annotated

from pydantic import Field, model_validator

from protocol import limits
from protocol.message import Message

FILE_NAME = "canary.json"

TOKENS = 16
"""Enough for every layer to mix positions; scored in the time of one step."""

_STRIDE = 7919
"""A prime: the tokens are all different unless the vocabulary is tiny."""


class Canary(Message):
    """What a version must say."""

    tokens: tuple[Annotated[int, Field(ge=0, lt=2**32)], ...] = Field(min_length=3, max_length=limits.SAMPLES_MAX)
    logprobs: tuple[float, ...]
    """Natural, at temperature 1; of every token but the first."""

    @model_validator(mode="after")
    def _one_for_each(self) -> "Canary":
        if len(self.logprobs) != len(self.tokens) - 1:
            raise ValueError(f"{len(self.tokens)} tokens, but {len(self.logprobs)} log-probabilities")
        return self


def text(vocabulary: int) -> tuple[int, ...]:
    """The tokens of the canary of such a vocabulary."""
    return tuple((1 + number * _STRIDE) % vocabulary for number in range(TOKENS))
