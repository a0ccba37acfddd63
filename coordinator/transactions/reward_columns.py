"""What a rollout's rewards are made of, as it is stored beside their scores.

    {"invalid": [numbers of the samples that broke the form], "components": {name: [one per sample]}}
    and, where any sample is learned from otherwise than whole and with weight 1:
    {"weights": [one per sample], "skips": [[[start, end] of tokens that are not trained on, …] per sample]}
    {"verifier_error": why it could not be judged}

- A component that a sample's reward does not have is null.
- Scores that are not known, not yet or never, are NaN, which is no reward and no zero.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coordinator.rules.lifecycle import RolloutState
from protocol.tasks import Reward, Spans

GIVEN_UP = RolloutState.UNJUDGED.value
"""The mark that says why a rollout could not be judged."""


def stored(rewards: Sequence[Reward]) -> dict[str, Any]:
    """The two columns of a rollout whose samples have these rewards."""
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
    """What each sample of a stored rollout earned; NaN where that is not known."""
    found: list[float] = np.frombuffer(row["rewards"], "<f4").tolist()
    return found


def unknown(samples: int) -> dict[str, Any]:
    """The same of one that is judged later."""
    return {"rewards": np.full(samples, np.nan, dtype="<f4").tobytes(), "marks": {}}


def read(row: Mapping[str, Any]) -> list[Reward]:
    """The rewards of a stored rollout; none while they are not known."""
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


def learned(marks: Mapping[str, Any], samples: int) -> list[tuple[float, Spans]]:
    """With which weight each sample is trained on, and which of its tokens are not."""
    weights, skips = marks.get("weights", [1.0] * samples), marks.get("skips", [()] * samples)
    return [(weight, tuple((start, end) for start, end in skip)) for weight, skip in zip(weights, skips, strict=True)]
