"""Replay measurements: how far claimed tokens and log-probabilities are from those that policy and seed dictate.

- A *scored* sample is the result of one prefill: for each position the log-probability of the claimed token, the
  probability of all tokens before it in token-id order, the same with it, and the token that the lease's uniform picks.
- The *margin* of a position is 0 if the claimed token is the one dictated. Else it is the number of nats that all
  logits on one side of the claimed token's edge must rise against those on the other until the uniform picks the
  claimed token. So the noise of other arithmetic has the same size everywhere in the distribution, also at tokens with
  high probability.
- The *error* of a position is the claimed log-probability less the replayed one.
- The *context* of a position is all tokens before it. Samples that begin with the same tokens share contexts there, and
  with them the effects of rounding: such positions count as one observation, however many they are.
- Pure: numpy in, numpy out. `score` is the definition for one sample; `coordinator.audit.scorer` does it on torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from protocol.errors import NonFiniteNumber
from protocol.work.rollout import Completion, Tokens
from protocol.work.sampling import pick, uniforms

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

MARGIN_MAX = 100.0
"""The margin, in nats, of a token that no noise could have picked; it keeps evidence finite."""


@dataclass(frozen=True)
class Prefill:
    """A claim to score: its prompt, its completions (some may be empty), and the seed and temperature of its lease."""

    prompt: Tokens
    completions: Sequence[Tokens]
    seed: int
    temperature: float


@dataclass(frozen=True)
class Scored:
    """The scores of one sample under one version, position by position."""

    logprobs: Floats
    """Log-probabilities of the claimed tokens."""
    below: Floats
    """Probabilities of all tokens with smaller ids."""
    upto: Floats
    """The probabilities of `below`, with the claimed token."""
    dictated: Integers

    def since(self, start: int) -> "Scored":
        """Return the positions from `start` on."""
        return Scored(self.logprobs[start:], self.below[start:], self.upto[start:], self.dictated[start:])


@dataclass(frozen=True)
class ReplayMeasurement:
    """The measurements of all positions of some samples of one claim, one after the other."""

    sample: Integers
    position: Integers
    context: Integers
    """Numbers of contexts, equal for positions with the same tokens before them."""
    claimed: Integers
    dictated: Integers
    margins: Floats
    claimed_logprobs: Floats
    logprobs: Floats

    def __len__(self) -> int:
        return len(self.margins)

    @property
    def errors(self) -> Floats:
        return self.claimed_logprobs - self.logprobs

    def sums(self, values: Floats) -> Floats:
        """Return the sum of the positions' values for each context."""
        _, place = np.unique(self.context, return_inverse=True)
        return np.bincount(place, weights=values).astype(np.float64)

    def means(self, values: Floats) -> Floats:
        """Return the mean of the positions' values for each context."""
        return self.sums(values) / self.sums(np.ones_like(values))


def score(logits: NDArray[np.floating], chances: Floats, tokens: Sequence[int], temperature: float = 1.0) -> Scored:
    """Score T tokens by a policy's logits [T, V]."""
    scaled = logits.astype(np.float64) / temperature
    odds = np.exp(scaled - scaled.max(-1, keepdims=True))  # [T, V]
    cumulative = odds.cumsum(-1)
    total = cumulative[:, -1]
    if not np.isfinite(total).all():
        raise NonFiniteNumber("The policy's logits are not numbers.")
    places, claimed = np.arange(len(tokens)), np.asarray(tokens)
    before = np.concatenate([np.zeros((len(tokens), 1)), cumulative], axis=-1)  # [T, V + 1]
    return Scored(
        logprobs=np.log(np.maximum(odds[places, claimed] / total, np.finfo(np.float64).tiny)),
        below=before[places, claimed] / total,
        upto=cumulative[places, claimed] / total,
        dictated=np.array([pick(row, chance) for row, chance in zip(odds, chances, strict=True)], np.int64),
    )


def margins(scored: Scored, claimed: Integers, chances: Floats) -> Floats:
    """Return the margin of each claimed token, in nats."""
    target = _log_odds(chances)
    short = _log_odds(scored.below) - target  # > 0: the uniform lies before the claimed token
    beyond = target - _log_odds(scored.upto)  # ≥ 0: it lies behind
    missed = np.clip(np.maximum(short, beyond), 0.0, MARGIN_MAX)
    return np.where(scored.dictated == claimed, 0.0, missed)


def measure(
    completions: Sequence[Completion],
    scored: Sequence[Scored],
    seed: int,
    numbers: Sequence[int] | None = None,
    *,
    whole: Sequence[Tokens] | None = None,
) -> ReplayMeasurement:
    """Compare samples of one claim with their replay.

    `numbers` are the samples' numbers within the lease, by default 0, 1, 2 …; `whole` has their tokens from the first
    one on, if some begin after a prefix that others sampled.
    """
    numbers = range(len(completions)) if numbers is None else numbers
    rows = contexts([said.tokens for said in completions] if whole is None else whole)
    return _together(
        [
            _measure(number, completion, replay, uniforms(seed, number, completion.start + len(completion.tokens)), row)
            for number, completion, replay, row in zip(numbers, completions, scored, rows, strict=True)
        ]
    )


def contexts(rows: Sequence[Tokens]) -> list[Integers]:
    """Return a number for each position of each row, the same one if the rows are equal up to there."""
    known: dict[tuple[int, int], int] = {}  # (context, token) → the context after it
    numbers = []
    for row in rows:
        context, row_numbers = 0, []
        for token in row.tolist():
            row_numbers.append(context)
            context = known.setdefault((context, token), len(known) + 1)
        numbers.append(np.array(row_numbers, np.int64))
    return numbers


def joined(parts: Sequence[ReplayMeasurement]) -> ReplayMeasurement:
    """Join the positions of several claims; no two claims share a context."""
    ends = np.cumsum([0, *(int(part.context.max(initial=-1)) + 1 for part in parts)])
    return _together([replace(part, context=part.context + end) for part, end in zip(parts, ends, strict=False)])


def _together(parts: Sequence[ReplayMeasurement]) -> ReplayMeasurement:
    fields = ReplayMeasurement.__dataclass_fields__
    return ReplayMeasurement(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in fields})


def _measure(
    number: int, completion: Completion, scored: Scored, chances: Floats, context: Integers
) -> ReplayMeasurement:
    claimed = completion.tokens.astype(np.int64)
    return ReplayMeasurement(
        sample=np.full(len(claimed), number, np.int64),
        position=completion.start + np.arange(len(claimed)),
        context=context[len(context) - len(claimed) :],
        claimed=claimed,
        dictated=scored.dictated,
        margins=margins(scored, claimed, chances[completion.start :]),
        claimed_logprobs=completion.logprobs.astype(np.float64),
        logprobs=scored.logprobs,
    )


def _log_odds(chances: Floats) -> Floats:
    """Return log(x / (1 − x)), finite at both ends: the smallest uniform above zero is 2^-53."""
    inner = np.clip(chances, 2.0**-54, 1 - 2.0**-53)
    return np.log(inner) - np.log1p(-inner)
