"""Every attack that is played, in the order of the table."""

from tests.adversaries import (
    answers,
    choosing,
    forging,
    leasing,
    mismatch,
    payloads,
    poisoning,
    telling,
    theft,
    waiting,
    weights,
)
from tests.adversaries.nodes import Adversary

OTHER_WEIGHTS: tuple[type[Adversary], ...] = (
    weights.Stale,
    weights.StalePrefilled,
    weights.Small,
    weights.SmallPrefilled,
    weights.FourBits,
    weights.FourBitsPrefilled,
    weights.EightBits,
    weights.EightBitsPrefilled,
)
"""Adversaries whose weights are nearly the claimed ones, or cheaper."""

OTHER_TOKENS: tuple[type[Adversary], ...] = (forging.OneToken, choosing.BestOfMany)
"""Adversaries with the right weights, and some tokens that the seed did not dictate."""

AT_ONCE: tuple[type[Adversary], ...] = (
    forging.Canned,
    forging.OldWork,
    forging.SentTwice,
    forging.Copied,
    forging.OneToken,
    *OTHER_WEIGHTS,
    choosing.BestOfMany,
    choosing.EarlyEnd,
    choosing.Padded,
    choosing.CherryPicker,
    leasing.Griefer,
    leasing.Braggart,
    leasing.PriceRaiser,
    payloads.Hostile,
    payloads.FalseAccuser,
    telling.Teller,
    mismatch.ToldTwice,
    mismatch.Disagreeing,
    answers.Speller,
    poisoning.Poisoner,
    waiting.Whitewasher,
)
"""Adversaries that cheat from their first group on."""

PATIENT: tuple[type[waiting.Sleeper], ...] = (
    waiting.Sleeper,
    waiting.RareSleeper,
    waiting.Predicting,
    waiting.ManyKeys,
    theft.KeyThief,
    theft.GreedyThief,
)
"""Adversaries that cheat when not all is audited; what they gain is chance, so they are played with several secrets."""
