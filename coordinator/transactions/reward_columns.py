"""Reward columns: the components and marks of a rollout's rewards, as they are stored beside the scores.

    {"invalid": [numbers of the samples that broke the form], "components": {name: [one per sample]}}
    and, if any sample is not trained on whole and with weight 1:
    {"weights": [one per sample], "skips": [[[start, end] of tokens that are not trained on, …] per sample]}
    {"verifier_error": the reason why it could not be judged}

- A component that a sample's reward does not have is null.
- A score that is not known, yet or ever, is NaN; that means no reward, not a reward of 0.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from coordinator.rules.lifecycle import RolloutState
from protocol.tasks import Reward, Spans

UNKNOWN = Reward(math.nan, "ok")
"""The place of a reward that is not known yet."""

GIVEN_UP = RolloutState.UNJUDGED.value
"""The mark with the reason why a rollout could not be judged."""


COMPONENTS_SHOWN = 16
"""The most components whose means the learner's boards and pages get."""


def stored(rewards: Sequence[Reward]) -> dict[str, Any]:
    """Return the two columns of a rollout whose samples have these rewards."""
    names = sorted({name for reward in rewards for name in reward.components})
    invalid = [number for number, reward in enumerate(rewards) if reward.status == "invalid"]
    components = {name: [reward.components.get(name) for reward in rewards] for name in names}
    scores = np.array([reward.score for reward in rewards], dtype="<f4")
    marks: dict[str, Any] = {"invalid": invalid, "components": components}
    if any(reward.weight != 1 or reward.skip for reward in rewards):
        marks["weights"] = [reward.weight for reward in rewards]
        marks["skips"] = [[list(span) for span in reward.skip] for reward in rewards]
    return {"rewards": scores.tobytes(), "marks": marks}


def scores(row: Mapping[str, Any]) -> list[float]:
    """Return the score of each sample of a stored rollout; NaN if it is not known."""
    known: list[float] = np.frombuffer(row["rewards"], "<f4").tolist()
    return known


def unknown(samples: int) -> dict[str, Any]:
    """Return the two columns of a rollout that is judged later."""
    return {"rewards": np.full(samples, np.nan, dtype="<f4").tobytes(), "marks": {}}


def read(row: Mapping[str, Any]) -> list[Reward]:
    """Return the rewards of a stored rollout; an empty list while they are not known."""
    marks, scores = row["marks"], np.frombuffer(row["rewards"], "<f4")
    if why := marks.get(GIVEN_UP):
        return [Reward(0.0, "verifier_error", reason=why)] * len(scores)
    if np.isnan(scores).any():
        return []
    broken, components = set(marks.get("invalid", ())), marks.get("components", {})
    lessons = learned(marks, len(scores))
    return [
        Reward(
            score,
            "invalid" if number in broken else "ok",
            {name: values[number] for name, values in components.items() if values[number] is not None},
            weight=lessons[number][0],
            skip=lessons[number][1],
        )
        for number, score in enumerate(scores.tolist())
    ]


def read_known(row: Mapping[str, Any]) -> list[Reward | None]:
    """Return the rewards of a stored rollout that are known already, and None for the others."""
    known = np.frombuffer(row["rewards"], "<f4")
    if np.isnan(known).all():
        return [None] * len(known)
    filled = read({"rewards": np.nan_to_num(known).astype("<f4").tobytes(), "marks": row["marks"]})
    return [None if unknown else reward for reward, unknown in zip(filled, np.isnan(known).tolist(), strict=True)]


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the share of invalid samples of stored rollouts, and the mean of each component, the first by name."""
    samples, invalid, components = 0, 0, defaultdict[str, list[float]](list)
    for row in rows:
        samples += len(scores(row))
        invalid += len(row["marks"].get("invalid", ()))
        for name, values in row["marks"].get("components", {}).items():
            components[name] += [value for value in values if value is not None]
    known = [name for name in sorted(components) if components[name]][:COMPONENTS_SHOWN]
    means = {f"component/{name}": fmean(components[name]) for name in known}
    return {"invalid": invalid / max(1, samples), **means}


class SampleLesson(NamedTuple):
    """A sample's weight in training, and the spans of its tokens that are not trained on."""

    weight: float
    skip: Spans


def learned(marks: Mapping[str, Any], samples: int) -> list[SampleLesson]:
    """Return what is to be learned of each sample."""
    weights, skips = marks.get("weights", [1.0] * samples), marks.get("skips", [()] * samples)
    return [
        SampleLesson(weight, tuple((start, end) for start, end in skip))
        for weight, skip in zip(weights, skips, strict=True)
    ]
