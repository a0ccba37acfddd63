"""Training groups as the coordinator would hand them out."""

from collections.abc import Sequence

from protocol.work.learning import TrainingGroup, TrainingSample
from protocol.work.rollout import pack_logprobs, pack_tokens

Completion = tuple[list[int], list[float], float]
"""Tokens, log-probabilities, reward."""


def group(number: int, prompt: Sequence[int], completions: Sequence[Completion]) -> TrainingGroup:
    return TrainingGroup(
        claim_id=f"{number:064x}",
        prompt=pack_tokens(list(prompt)),
        policy_update=0,
        samples=tuple(
            TrainingSample(tokens=pack_tokens(tokens), logprobs=pack_logprobs(logprobs), reward=reward)
            for tokens, logprobs, reward in completions
        ),
    )


UNEQUAL = (
    group(0, [19, 20, 31], [([21, 22, 2], [-1.0, -2.0, -0.5], 1.0), ([23, 2], [-3.0, -0.1], 0.0)]),
    group(1, [19, 20, 13, 21, 31], [([2], [-4.0], 0.0), ([24, 25, 26, 27], [-1.0, -1.0, -1.0, -1.0], 1.0)]),
    group(2, [31], [([21, 2], [-2.0, -2.0], 0.0), ([22, 2], [-2.0, -2.0], 0.0)]),
)
"""Prompts and completions of different lengths; the last group has no signal."""
