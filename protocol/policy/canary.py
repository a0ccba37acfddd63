"""The canary of a policy version: a text, and the log-probability of each of its tokens under the published weights.

- `canary.json` is a file of the policy folder, so the manifest binds it like any other.
- The learner computes it from the published weights; an engine that loads them must get the same values.
- The text is ordinary language, which a trained model predicts with little numerical noise. On meaningless text
  rounding errors are largest: on SmolLM2-135M, sound bf16 weights are off by 0.76 nats there, and by 0.025 nats here.
- The first `FIRST_JUDGED` tokens are not judged: trained models have massive activations at the first positions, and
  bf16 is off by up to 2.4 nats there.
- Beside the float32 values it has those of the same weights computed in bfloat16 and float16. They set the tolerance of
  an engine with that precision, for each version: no number measured on another model is used.
- It has no values for a precision whose range the activations exceed (float16 ends at 65,504): an engine of that
  precision must only give numbers. A canary of an older learner has only the float32 values.
"""

from collections.abc import Sequence
from math import inf
from typing import Annotated

from pydantic import Field, model_validator

from protocol import limits
from protocol.wire.message import Message

FILE_NAME = "canary.json"

TEXT = (
    "The ferry left the harbour a little after six in the morning. Most of the passengers were still asleep, so the "
    "deck was quiet and the gulls had it to themselves. An old man in a blue coat sat near the stern and read "
    "yesterday's newspaper. He looked up when the island came into view, folded the paper twice and put it into his "
    'pocket. "There it is," he said to the girl beside him. "Your grandmother will be waiting at the pier, as she '
    'always does."'
)
"""Plain prose without rare words: 102 tokens for SmolLM2. Any trained model with an English vocabulary predicts it."""

TOKENS = 72
"""64 of them are judged: the standard error of their mean is an eighth of one token's."""

FIRST_JUDGED = 8
"""Tokens before the first judged one."""

AHEAD = 8
"""Tokens that are scored after each prefix, the first by prefill and the others by decoding: 8 rows of 8 tokens cost a
quarter of what 16 rows of 4 do."""

FLOAT32_NATS = 1e-3
"""Highest mean error of sound float32 weights; measured: 2e-6 at worst."""

NOISE_FACTOR = 3.0
"""Highest mean error of a lower precision, as a multiple of the learner's own in that precision.

The learner computes under autocast, which keeps sums and norms in float32: SmolLM2 is off by 0.020 nats there, by
0.025 with weights and activations all in bf16, and by 0.033 in vLLM. A projection scaled by a tenth is off by 0.096
at least."""

EIGHT_BIT_FACTOR = 4.0
"""The allowed difference for q8_0, as a multiple of the learner's own in bf16: llama.cpp also rounds activations to
eight bits. Measured: SmolLM2 is off by 0.061 nats, 3.1 times its 0.020."""

FP8_FACTOR = 16.0
"""The allowed difference for fp8, as a multiple of the learner's own in bf16: weights and activations have four bits
fewer, so that they are rounded 16 times as coarsely. Measured with vLLM on a CPU: SmolLM2 is off by 0.146 nats, 7.5
times its 0.0195, and a tiny policy 10.2 times. A projection scaled by a tenth may hide in it."""

FACTORS = {"bf16": NOISE_FACTOR, "fp16": NOISE_FACTOR, "q8_0": EIGHT_BIT_FACTOR, "fp8": FP8_FACTOR}
"""The factors by precision."""

_STRIDE = 7919
"""A prime: the tokens are all different unless the vocabulary is tiny."""

Token = Annotated[int, Field(ge=0, lt=2**32)]


class Canary(Message):
    """The text as tokens, and the natural log-probability, at temperature 1, of every token but the first."""

    tokens: tuple[Token, ...] = Field(min_length=3, max_length=limits.CANARY_TOKENS_MAX)
    logprobs: tuple[float, ...]
    """The log-probabilities in float32."""
    bfloat16: tuple[float, ...] = ()
    float16: tuple[float, ...] = ()

    @model_validator(mode="after")
    def _one_for_each(self) -> "Canary":
        for name in ("logprobs", "bfloat16", "float16"):
            count = len(getattr(self, name))
            if count != len(self.tokens) - 1 and (count or name == "logprobs"):
                raise ValueError(f"{len(self.tokens)} tokens, but {count} values of {name}")
        return self

    @property
    def ahead(self) -> int:
        """Return the number of tokens that are scored after each prefix."""
        return min(AHEAD, len(self.tokens) - 1)

    @property
    def prefixes(self) -> tuple[int, ...]:
        """Return the lengths of the prefixes after which tokens are scored: together they cover every judged token."""
        first = min(FIRST_JUDGED, len(self.tokens) - self.ahead)
        return tuple(range(first, len(self.tokens) - self.ahead + 1, self.ahead))

    def tolerance_nats(self, precision: str) -> float:
        """Return the mean error that sound weights may have in this precision, over the judged tokens."""
        computed = {"fp16": self.float16}.get(precision, self.bfloat16) if precision in FACTORS else None
        if computed is None:
            return FLOAT32_NATS
        if not computed:
            return inf
        judged = slice(self.prefixes[0] - 1, None)
        errors = [abs(low - full) for low, full in zip(computed[judged], self.logprobs[judged], strict=True)]
        return FLOAT32_NATS + FACTORS[precision] * sum(errors) / len(errors)


def spread(vocabulary: int, count: int = TOKENS) -> tuple[int, ...]:
    """Return tokens spread over a vocabulary, for a tokenizer that cannot encode the text."""
    return tuple((1 + number * _STRIDE) % vocabulary for number in range(count))


def is_written(tokens: Sequence[int], decoded: str) -> bool:
    """Return True if a tokenizer encoded the beginning of the text: enough tokens, and nothing lost."""
    return len(tokens) == TOKENS and bool(decoded.strip()) and TEXT.startswith(decoded.strip())
