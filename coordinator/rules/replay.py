"""Replay measurements: how far claimed tokens and log-probabilities are from those that policy and seed dictate.

- A *scored* sample is the result of one prefill: for each position the log-probability of the claimed token, the token
  that the lease's uniform picks, and the margin between both.
- The *margin* of a position is 0 if the claimed token is the one dictated. Else it is the number of nats that all
  logits on one side of the claimed token's edge must rise against those on the other until the uniform picks the
  claimed token. So the noise of other arithmetic has the same size everywhere in the distribution, also at tokens with
  high probability.
- Nats are those at the version's temperature, for which tolerances are measured. A lease with a temperature of its own
  has margins and log-probabilities in the same nats: noise of the logits has one size at every temperature.
- At temperature 0 the largest logit dictates the token. The margin is how far the claimed token's logit is below it.
- The *error* of a position is the claimed log-probability less the replayed one.
- The *context* of a position is all tokens before it. Samples that begin with the same tokens share contexts there, and
  with them the effects of rounding: such positions count as one observation, however many they are.
- Pure: numpy in, numpy out. `score` is the definition for one sample; `coordinator.audit.scorer` does it on torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from protocol.errors import NonFiniteNumber
from protocol.work.rollout import Completion, Tokens
from protocol.work.sampling import pick

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

MARGIN_MAX = 100.0
"""The margin, in nats, of a token that no noise could have picked; it keeps evidence finite."""


@dataclass(frozen=True)
class Prefill:
    """A claim to score: its prompt, its completions (some may be empty), the seed of its lease, and temperatures."""

    prompt: Tokens
    completions: Sequence[Tokens]
    seed: int
    temperature: float
    """The version's."""
    own_temperature: float | None = None
    """The lease's, at which tokens were to be drawn; None: the version's."""


@dataclass(frozen=True)
class Scored:
    """The scores of one sample under one version, position by position."""

    logprobs: Floats
    """Log-probabilities of the claimed tokens."""
    margins: Floats
    dictated: Integers

    def since(self, start: int) -> "Scored":
        """Return the positions from `start` on."""
        return Scored(self.logprobs[start:], self.margins[start:], self.dictated[start:])


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
        return np.bincount(self._places, weights=values).astype(np.float64)

    def means(self, values: Floats) -> Floats:
        """Return the mean of the positions' values for each context."""
        return self.sums(values) / self.sums(np.ones_like(values))

    @cached_property
    def _places(self) -> Integers:
        """Return the place of each position's context among all contexts, in order; a verdict asks for it 14 times."""
        _, places = np.unique(self.context, return_inverse=True)
        return places.astype(np.int64)


def score(
    logits: NDArray[np.floating],
    chances: Floats,
    tokens: Sequence[int],
    temperature: float = 1.0,
    own_temperature: float | None = None,
) -> Scored:
    """Score T tokens by a policy's logits [T, V]."""
    places, claimed = np.arange(len(tokens)), np.asarray(tokens, np.int64)
    scaled = logits.astype(np.float64) / temperature
    odds = np.exp(scaled - scaled.max(-1, keepdims=True))  # [T, V]
    total = odds.sum(-1)
    if not np.isfinite(total).all():
        raise NonFiniteNumber("The policy's logits are not numbers.")
    if own_temperature == 0:
        dictated = scaled.argmax(-1)
        missed = scaled.max(-1) - scaled[places, claimed]
    else:
        own = temperature if own_temperature is None else own_temperature
        nats = scaled * (temperature / own)
        weights = np.exp(nats - nats.max(-1, keepdims=True))
        dictated = np.array([pick(row, chance) for row, chance in zip(weights, chances, strict=True)], np.int64)
        missed = _missed(nats, claimed, chances, own / temperature)
    return Scored(
        logprobs=np.log(np.maximum(odds[places, claimed] / total, np.finfo(np.float64).tiny)),
        margins=np.where(dictated == claimed, 0.0, np.minimum(missed, MARGIN_MAX)),
        dictated=dictated,
    )


def _missed(nats: Floats, claimed: Integers, chances: Floats, scale: float) -> Floats:
    """Return how far each uniform lies outside of its claimed token's part, in log-odds times `scale`; 0 within."""
    before, upto = np.arange(nats.shape[1]) < claimed[:, None], np.arange(nats.shape[1]) <= claimed[:, None]
    low, rest, high, after = (
        np.logaddexp.reduce(np.where(part, nats, -np.inf), axis=-1) for part in (before, ~before, upto, ~upto)
    )
    target = log_odds(chances)
    lowest, highest = log_odds(np.array([0.0, 1.0])) * max(1.0, 1 / scale)
    short = np.clip(low - rest, lowest, highest) - target  # > 0: the uniform lies before the claimed token
    beyond = target - np.clip(high - after, lowest, highest)  # ≥ 0: it lies behind
    missed: Floats = np.maximum(np.maximum(short, beyond), 0.0) * scale
    return missed


def log_odds(chances: Floats) -> Floats:
    """Return log(x / (1 − x)), finite at both ends: the smallest uniform above zero is 2^-53."""
    inner = np.clip(chances, 2.0**-54, 1 - 2.0**-53)
    return np.log(inner) - np.log1p(-inner)


def measure(
    completions: Sequence[Completion],
    scored: Sequence[Scored],
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
            _measure(number, completion, replay, row)
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


def _measure(number: int, completion: Completion, scored: Scored, context: Integers) -> ReplayMeasurement:
    claimed = completion.tokens.astype(np.int64)
    return ReplayMeasurement(
        sample=np.full(len(claimed), number, np.int64),
        position=completion.start + np.arange(len(claimed)),
        context=context[len(context) - len(claimed) :],
        claimed=claimed,
        dictated=scored.dictated,
        margins=scored.margins,
        claimed_logprobs=completion.logprobs.astype(np.float64),
        logprobs=scored.logprobs,
    )
