"""Advantages computed from rewards, [N] → [N], and the choice of the samples that count.

- Equal rewards get an advantage of exactly zero, whatever rounding did to their mean or their deviation.
- The filter uses the raw score. With shaped rewards every group would vary by its lengths, and the policy would learn
  the length only.

Factors on the advantages, [N], choose the trajectories that are trained on:

    all        1 for each
    pairs      1 for the samples of the pairs that are kept, 0 for all others
    weighted   the number of draws of a sample, divided by its expected number

- A pair is the best and the worst sample of a group, then the second best and the second worst, and so on; the pairs
  with the greatest contrast are kept. This is biased: the samples between them are not used.
- A sample is drawn with a chance proportional to |advantage|, and its factor corrects that: the gradient, averaged over
  draws, is that of all samples.
- A sample with the factor 0 costs no backward pass. It still has its share: leaving samples out does not scale the
  others up.
- The draw of an update depends on the round's seed and the update's number alone: a resumed learner draws the same.
"""

from collections.abc import Sequence
from math import ceil

import torch

from coordinator.learner.algorithm import Algorithm, Baseline
from coordinator.model.batch import Tensors, collate
from protocol.work.learning import TrainingGroup


def judged(data: Tensors, algorithm: Algorithm, *, ends: Sequence[int]) -> torch.Tensor:
    """Return which samples count at all: → [N]."""
    counts = torch.ones(len(data.rewards), dtype=torch.bool)
    if algorithm.mask_truncated_completions:
        counts &= ended(data, ends)
    if algorithm.filter_zero_variance:
        counts &= varied(data.rewards, data.owners, len(data.prompts))[data.owners]
    return counts


def ended(data: Tensors, ends: Sequence[int]) -> torch.Tensor:
    """Return which samples end with an end token; the others were cut: → [N]."""
    last = data.tokens.gather(1, (data.lengths[:, None] - 1).clamp(min=0))[:, 0]
    return torch.isin(last, torch.tensor(list(ends)))


def of_batch(data: Tensors, counts: torch.Tensor, algorithm: Algorithm, *, longest: int) -> torch.Tensor:
    """Return the advantages of a batch, weighted as the task demands: → [N], 0 for samples that do not count."""
    shaped = data.rewards + overlong_penalty(data.mask.sum(1), longest, algorithm)
    return advantages(shaped, data.owners, len(data.prompts), algorithm) * counts * data.weights


def of_group(
    group: TrainingGroup, algorithm: Algorithm, *, ends: Sequence[int], longest: int
) -> tuple[float, ...] | None:
    """Return the advantages of one group; None if they depend on the rest of its batch."""
    if "batch" in (algorithm.baseline, algorithm.scale_rewards):
        return None
    data = collate([group])
    counts = judged(data, algorithm, ends=ends)
    return tuple(of_batch(data, counts, algorithm, longest=longest).tolist())


def advantages(rewards: torch.Tensor, owners: torch.Tensor, groups: int, algorithm: Algorithm) -> torch.Tensor:
    """Return (reward − baseline) / deviation, both as `algorithm` names them: rewards [N], owners [N] → [N]."""
    count = _sums(torch.ones_like(rewards), owners, groups)  # [G]
    mean = _sums(rewards, owners, groups) / count.clamp(min=1)  # [G]
    centred = rewards - _baseline(rewards, mean[owners], algorithm.baseline)
    if algorithm.baseline == "leave_one_out":  # the mean of the others: the difference grows by n / (n − 1)
        centred = centred * (count / (count - 1).clamp(min=1))[owners]
    # Equal rewards are detected by comparison: their mean may have a rounding error, which division would enlarge.
    if algorithm.compares_groups:
        centred = torch.where(varied(rewards, owners, groups)[owners], centred, 0.0)
    if "batch" in (algorithm.baseline, algorithm.scale_rewards):
        centred = torch.where(rewards.max() > rewards.min(), centred, 0.0)
    match algorithm.scale_rewards:
        case "group":
            variance = _sums((rewards - mean[owners]).square(), owners, groups) / count.clamp(min=1)
            return centred / variance.sqrt()[owners].clamp(min=1e-6)
        case "batch":
            return centred / rewards.std(correction=0).clamp(min=1e-6)
        case "none":
            return centred


def _baseline(rewards: torch.Tensor, of_group: torch.Tensor, baseline: Baseline) -> torch.Tensor:
    match baseline:
        case "group" | "leave_one_out":
            return of_group
        case "batch":
            return rewards.mean()
        case "none":
            return torch.zeros(())


def varied(rewards: torch.Tensor, owners: torch.Tensor, groups: int) -> torch.Tensor:
    """Return which groups have rewards that differ: → [G]."""
    zeros = torch.zeros(groups)
    high = zeros.scatter_reduce(0, owners, rewards, "amax", include_self=False)
    return high > zeros.scatter_reduce(0, owners, rewards, "amin", include_self=False)


def overlong_penalty(lengths: torch.Tensor, longest: int, algorithm: Algorithm) -> torch.Tensor:
    """Return DAPO's soft penalty, 0 before the buffer and −penalty at the longest length: [N] → [N]."""
    if not algorithm.overlong_buffer:
        return torch.zeros_like(lengths)
    over = (lengths - (longest - algorithm.overlong_buffer)) / algorithm.overlong_buffer
    return -algorithm.overlong_penalty * over.clamp(0.0, 1.0)


def _sums(values: torch.Tensor, owners: torch.Tensor, groups: int) -> torch.Tensor:
    return torch.zeros(groups, dtype=values.dtype).index_add(0, owners, values)


def factors(
    advantages: torch.Tensor, owners: torch.Tensor, algorithm: Algorithm, *, seed: int, update: int
) -> torch.Tensor:
    """Return the factor of each advantage: [N] → [N]."""
    match algorithm.trajectories:
        case "all":
            return torch.ones_like(advantages)
        case "pairs":
            return _pairs(advantages, owners, algorithm.trajectory_share)
        case "weighted":
            return _drawn(advantages, algorithm.trajectory_share, _chance(seed, update))


def _pairs(advantages: torch.Tensor, owners: torch.Tensor, share: float) -> torch.Tensor:
    kept = torch.zeros_like(advantages)
    for group in range(int(owners.max()) + 1):
        rows = (owners == group).nonzero()[:, 0]
        order = rows[advantages[rows].argsort(descending=True, stable=True)]
        pairs = len(order) // 2  # the first pairs have the greatest contrast: the order is that of advantages
        for best, worst in list(zip(order[:pairs], order.flip(0)[:pairs], strict=True))[: ceil(share * pairs)]:
            if advantages[best] > advantages[worst]:
                kept[best] = kept[worst] = 1.0
    return kept


def _drawn(advantages: torch.Tensor, share: float, chance: float) -> torch.Tensor:
    """Draw systematically: with equal steps from one random offset over the cumulative |advantages|."""
    weights = advantages.abs().double()
    teaching = int((weights > 0).sum())
    if not teaching:
        return torch.ones_like(advantages)
    draws = ceil(share * teaching)
    step = weights.sum() / draws
    ends = torch.floor(weights.cumsum(0) / step + chance)
    ends[weights.nonzero()[-1, 0] :] = draws  # a rounding of the sum must not lose the last draw
    counts = torch.diff(ends, prepend=torch.zeros(1, dtype=ends.dtype))
    return torch.where(weights > 0, counts * step / weights.clamp(min=1e-300), 0.0).to(advantages.dtype)


def _chance(seed: int, update: int) -> float:
    """Return a number from 0 up to 1 for this update, which does not depend on earlier draws."""
    generator = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + update) % 2**63)
    return float(torch.rand(1, generator=generator, dtype=torch.float64))
