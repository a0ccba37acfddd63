"""What a replay measures: how far claimed tokens and log-probabilities lie from what policy and seed dictate.

- A *scored* sample is what one prefill says about it: for each position the log-probability of the claimed token, the
  mass of all tokens before it in token-id order and with it, and the token that the lease's uniform picks.
- The *margin* of a position is 0 if the claimed token is the one dictated. Else it is how many nats all logits on one
  side of the claimed token's edge must rise against those on the other until the uniform meets the claimed token.
  So the noise of other arithmetic has one size wherever in the distribution it strikes, sure tokens included.
- The *error* of a position is the claimed log-probability less the replayed one.
- The *context* of a position is all that stands before it. Samples that begin with the same tokens share contexts
  there, and with them whatever rounding does: such positions say one thing together, however many they are.
- What an environment said in an episode is fed to the model and not measured: nobody drew it.
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
"""Nats; stands for a token that no noise could have picked, and keeps evidence finite."""


@dataclass(frozen=True)
class Prefill:
    """One claim to score: its prompt, its completions, empty ones among them, and how its lease has them drawn."""

    prompt: Tokens
    completions: Sequence[Tokens]
    seed: int
    temperature: float


@dataclass(frozen=True)
class Scored:
    """One sample under one version, position by position."""

    logprobs: Floats
    """Of the claimed tokens."""
    below: Floats
    """Probability of all tokens with smaller ids."""
    upto: Floats
    """The same with the claimed token."""
    dictated: Integers

    def since(self, start: int) -> "Scored":
        """The positions from this one on."""
        return Scored(self.logprobs[start:], self.below[start:], self.upto[start:], self.dictated[start:])


@dataclass(frozen=True)
class ReplayMeasurement:
    """All positions of some samples of one claim, one after the other."""

    sample: Integers
    position: Integers
    context: Integers
    """Alike where all that stands before is the same."""
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
        """Of what each position has, for each context."""
        _, place = np.unique(self.context, return_inverse=True)
        return np.bincount(place, weights=values).astype(np.float64)

    def means(self, values: Floats) -> Floats:
        """The same, shared by the positions of the context."""
        return self.sums(values) / self.sums(np.ones_like(values))


def score(logits: NDArray[np.floating], chances: Floats, tokens: Sequence[int], temperature: float = 1.0) -> Scored:
    """What a policy's logits [T, V] say about T tokens."""
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
    """Nats by which each claimed token misses its uniform."""
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

    `numbers` are the samples' within the lease, by default 0, 1, 2 …; `whole` their tokens from the first one on, where
    some begin after a prefix that others sampled.
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
    """For each position of each row a number, the same one where the rows are alike up to there."""
    known: dict[tuple[int, int], int] = {}  # (context, token) → the context after it
    found = []
    for row in rows:
        context, here = 0, []
        for token in row.tolist():
            here.append(context)
            context = known.setdefault((context, token), len(known) + 1)
        found.append(np.array(here, np.int64))
    return found


def joined(parts: Sequence[ReplayMeasurement]) -> ReplayMeasurement:
    """The positions of several claims, together; none of them share a context."""
    ends = np.cumsum([0, *(int(part.context.max(initial=-1)) + 1 for part in parts)])
    return _together([replace(part, context=part.context + end) for part, end in zip(parts, ends, strict=False)])


def _together(parts: Sequence[ReplayMeasurement]) -> ReplayMeasurement:
    fields = ReplayMeasurement.__dataclass_fields__
    return ReplayMeasurement(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in fields})


def _measure(
    number: int, completion: Completion, scored: Scored, chances: Floats, context: Integers
) -> ReplayMeasurement:
    drawn, claimed = completion.sampled, completion.tokens.astype(np.int64)
    return ReplayMeasurement(
        sample=np.full(completion.paid_tokens, number, np.int64),
        position=completion.start + np.flatnonzero(drawn),
        context=context[len(context) - len(claimed) :][drawn],
        claimed=claimed[drawn],
        dictated=scored.dictated[drawn],
        margins=margins(scored, claimed, chances[completion.start :])[drawn],
        claimed_logprobs=completion.logprobs.astype(np.float64)[drawn],
        logprobs=scored.logprobs[drawn],
    )


def _log_odds(chances: Floats) -> Floats:
    """log(x / (1 − x)), finite at both ends: the smallest uniform but zero is 2^-53."""
    inner = np.clip(chances, 2.0**-54, 1 - 2.0**-53)
    return np.log(inner) - np.log1p(-inner)
