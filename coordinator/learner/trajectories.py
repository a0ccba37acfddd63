"""Which samples of a batch are trained on, and how much each says: factors on their advantages, [N].

    all        1 for each
    pairs      1 for the samples of the pairs that are kept, 0 for all others
    weighted   how often a sample was drawn, over how often it would be on the mean

- A pair is the best and the worst of a group, then the second best and the second worst, and so on; those with the
  greatest contrast are kept. That is biased: what lies between says nothing any more.
- A draw is by |advantage|, and its factor takes that back: on the mean over draws the gradient is that of all samples.
- Whoever has the factor 0 costs no backward pass. Shares still count it: leaving samples out does not scale others up.
- The draw of an update follows from the round's seed and the update's number alone: a resumed learner draws the same.
"""

from math import ceil

import torch

from coordinator.learner.algorithm import Algorithm


def factors(
    advantages: torch.Tensor, owners: torch.Tensor, algorithm: Algorithm, *, seed: int, update: int
) -> torch.Tensor:
    """What each advantage is multiplied by: [N] → [N]."""
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
    """Systematic draws: a comb of equal steps, from one random offset, laid over the samples' |advantages|."""
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
    """A number from 0 up to 1 that belongs to this update, whatever else was drawn before."""
    generator = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + update) % 2**63)
    return float(torch.rand(1, generator=generator, dtype=torch.float64))
