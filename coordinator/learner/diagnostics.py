"""Metrics of an update: the distance of its samples from the policy, and the effect of the correction.

With d_t = log π_old − log μ over the tokens that are judged, and w_t the weight of each:

    is/ratio_mean, _min, _max   of exp(d_t)
    is/chi2                     mean exp(2 d_t) − 1: the variance that a plain importance weight would have
    is/ess                      (Σ w)² / (n Σ w²): the effective sample size as a share of the tokens
    is/masked_frac              share of the tokens that were dropped, alone or with their sample
    kl/k1, kl/k3                mean −d_t, which may be negative, and mean exp(d_t) − 1 − d_t, which may not
    clip/low, clip/high         share of tokens whose ratio was clipped from below, from above
"""

import torch

Metrics = dict[str, float]


def of_distance(distance: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor, keep: torch.Tensor) -> Metrics:
    """Return metrics of the importance ratios; if no token is judged, those of fresh samples."""
    judged = mask > 0
    seen, weights = distance[judged].double(), weight[judged].double()
    if not len(seen):
        seen, weights = torch.zeros(1).double(), torch.ones(1).double()
    ratio = seen.exp()
    return {
        "is/ratio_mean": float(ratio.mean()),
        "is/ratio_min": float(ratio.min()),
        "is/ratio_max": float(ratio.max()),
        "is/chi2": float(ratio.square().mean()) - 1.0,
        "is/ess": float(weights.sum().square() / (weights.square().sum() * len(weights))),
        "is/masked_frac": 1.0 - mean(keep, mask) if bool(judged.any()) else 0.0,
        "kl/k1": -float(seen.mean()),
        "kl/k3": float((seen.expm1() - seen).mean()),
    }


def of_clipping(clipped: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> Metrics:
    """Return the shares clipped from below and above: clipped [N, T] or [N, 1], advantages [N, 1].

    The side follows from the sign of the advantage.
    """
    return {
        "clip/low": mean((clipped & (advantages < 0)).float().expand_as(mask), mask),
        "clip/high": mean((clipped & (advantages > 0)).float().expand_as(mask), mask),
    }


def mean(values: torch.Tensor, mask: torch.Tensor) -> float:
    """Return the mean over the tokens that are judged; infinite values elsewhere are ignored."""
    return float(torch.where(mask > 0, values, 0.0).sum() / mask.sum().clamp(min=1))
