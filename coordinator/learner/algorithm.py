"""The objectives of training: presets by name over a few parts that combine freely. This module imports no torch.

- Names are those of TRL where TRL has an equivalent; docs/learning.md has every formula.
- A preset differs from plain GRPO only in the points of its own paper; the correction of stale samples is separate.
"""

from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

Baseline = Literal["group", "leave_one_out", "batch", "none"]
Scale = Literal["group", "batch", "none"]
Level = Literal["token", "sequence", "product"]
Clip = Literal["ppo", "cispo"]
Aggregation = Literal["sequence", "token", "constant"]
Mode = Literal["decoupled", "bypass", "none"]
Trajectories = Literal["all", "pairs", "weighted"]


@dataclass(frozen=True, slots=True)
class Correction:
    """The correction for samples of an older policy, or of one that computes differently."""

    mode: Mode = "decoupled"
    """`decoupled`: weigh by π_old/μ, clip π_θ/π_old. `bypass`: clip π_θ/μ. `none`: treat the samples as fresh."""
    level: Literal["token", "sequence"] = "token"
    """A weight for each token, or one for the sample: the product of the ratios of its tokens."""
    token_cap: float = 2.0
    """The largest weight; larger ones are truncated to it."""
    token_low: float = 0.0
    token_high: float = inf
    """A token is dropped if its ratio to μ leaves these bounds."""
    sequence_low: float = 0.5
    sequence_high: float = 2.0
    """A sample is dropped if the geometric mean of its ratios to μ leaves these bounds; wide enough for a model that
    moves at 1e-5, four updates later (`make bench-correction`)."""
    veto: float = 1e-4
    """A sample is dropped if the ratio of one token is below this, or above its inverse; 0 keeps all."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An objective; the defaults are GRPO."""

    baseline: Baseline = "group"
    """The value that is subtracted from a reward."""
    scale_rewards: Scale = "group"
    """The set of rewards whose deviation it is then divided by."""
    importance_sampling_level: Level = "token"
    """A ratio for each token, or one for the sample: the geometric mean, or the product."""
    clip: Clip = "ppo"
    epsilon: float = 0.2
    epsilon_high: float = 0.28
    """`ppo` keeps the ratio in [1 - epsilon, 1 + epsilon_high]; `cispo` truncates its weight at epsilon_high."""
    delta: float = inf
    """Bound of the ratio where the advantage is negative: dual clip."""
    minibatches: int = 1
    """Optimizer steps that a batch's groups are split into; the clip acts from the second step on."""
    loss_aggregation: Aggregation = "sequence"
    """Mean over samples of their means; over all tokens; or a sum divided by the longest possible length."""
    beta: float = 0.0
    """Weight of the divergence from the starting policy; 0 needs no second model."""
    entropy_bonus: float = 0.0
    """Weight of the entropy at each token, which the objective then raises."""
    filter_zero_variance: bool = False
    """Leave out groups whose *raw* scores are all equal; else they count in the mean, with advantage 0."""
    mask_truncated_completions: bool = False
    """Leave out samples that did not end by themselves."""
    overlong_buffer: int = 0
    """The number of tokens before the longest length over which a soft penalty grows to `overlong_penalty`."""
    overlong_penalty: float = 1.0
    trajectories: Trajectories = "all"
    """The samples that are trained on: all; the pairs of greatest contrast; or draws by |advantage|, corrected."""
    trajectory_share: float = 0.5
    """The share of the pairs, or of the samples whose advantage is not 0."""
    correction: Correction = field(default_factory=Correction)

    @property
    def compares_groups(self) -> bool:
        """Return True if a group whose rewards are all equal has advantages of 0."""
        return not {"group", "leave_one_out"}.isdisjoint((self.baseline, self.scale_rewards))


GRPO = Algorithm()

PRESETS: dict[str, Algorithm] = {
    "grpo": GRPO,
    "dapo": replace(
        GRPO,
        minibatches=4,
        loss_aggregation="token",
        filter_zero_variance=True,
        mask_truncated_completions=True,
    ),
    "dr_grpo": replace(GRPO, scale_rewards="none", loss_aggregation="constant", epsilon_high=0.2),
    "rloo": replace(
        GRPO,
        baseline="leave_one_out",
        scale_rewards="none",
        importance_sampling_level="product",
        epsilon_high=0.2,
    ),
    "reinforce_pp": replace(GRPO, baseline="batch", scale_rewards="batch", loss_aggregation="token", epsilon_high=0.2),
    "gspo": replace(GRPO, importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4, minibatches=4),
    "cispo": replace(GRPO, clip="cispo", epsilon_high=5.0, loss_aggregation="token", minibatches=4),
    "echo2": replace(GRPO, epsilon_high=0.2, correction=Correction(sequence_low=0.0, sequence_high=inf, veto=0.0)),
}
"""`echo2` is that of the ECHO-2 paper: GRPO times min(π_learner/π_sampler, C), at any distance of the sample."""
