"""The loss of one update: a clipped policy gradient, corrected for samples of older policies.

With μ the version that sampled, π_old the policy before the update, π_θ the policy in training, and A the advantage:

    decoupled   r_t = π_θ / π_old    ρ_t = min(π_old / μ, token_cap)
    bypass      r_t = π_θ / μ        ρ_t = 1
    none        r_t = π_θ / π_old    ρ_t = 1, and nothing is dropped

    loss = − Σ_t share_t · keep_t · (ρ_t · gain_t − β · k3_t + c · H(π_θ))

    ppo         gain_t = min(min(r_t, δ) · A, clip(r_t, 1 − ε, 1 + ε_high) · A)
    cispo       gain_t = min(r_t, ε_high) · A · log π_θ, where only log π_θ has a gradient

    k3_t = exp(d) − 1 − d, with d = log π_ref − log π_θ

- share_t adds up to one over all tokens of the batch, dropped ones included: otherwise dropping samples would scale the
  others' gradient up. It is known before the first forward pass, so the losses of micro-batches simply add.
- keep_t drops a whole sample if the geometric mean of π_old/μ leaves its bounds, or if one ratio is beyond the veto; it
  also drops single tokens whose ratio leaves the token bounds. ρ may be one weight for the sample: the product, capped.
- Tokens that are not judged get the log-probability 0: the policy may give an environment's text the probability 0, and
  infinity times a mask of 0 would be NaN.
- All numbers are float32, whatever type the model computes in.

Metrics of an update: the distance of its samples from the policy, and the effect of the correction.

With d_t = log π_old − log μ over the tokens that are judged, and w_t the weight of each:

    is/ratio_mean, _min, _max   of exp(d_t)
    is/ratio_p01, _p99          the ratio that 1 % of the tokens are below, above
    is/chi2                     mean exp(2 d_t) − 1: the variance that a plain importance weight would have
    is/ess                      (Σ w)² / (n Σ w²): the effective sample size as a share of the tokens
    is/masked_frac              share of the tokens that were dropped, alone or with their sample
    kl/k1, kl/k3                mean −d_t, which may be negative, and mean exp(d_t) − 1 − d_t, which may not
    clip/low, clip/high         share of tokens whose ratio was clipped from below, from above
"""

from dataclasses import dataclass
from math import ceil

import torch

from coordinator.learner.algorithm import Algorithm, Correction

Metrics = dict[str, float]


NATS_MAX = 20.0
"""The largest |log ratio|. Its exponential must stay finite, or one false claim makes the whole loss NaN."""


@dataclass(frozen=True)
class LossTerms:
    """The inputs of the loss of N samples of at most T tokens, beside the policy's own log-probabilities."""

    behaviour: torch.Tensor  # [N, T] log μ
    mask: torch.Tensor  # [N, T] 1 = a token that is judged
    shares: torch.Tensor  # [N, T] each token's share in the batch
    advantages: torch.Tensor  # [N]
    old: torch.Tensor | None = None  # [N, T] log π_old; None: the current log π_θ
    reference: torch.Tensor | None = None  # [N, T] log π_ref, if β > 0

    def rows(self, chosen: torch.Tensor, width: int) -> "LossTerms":
        """Return the terms of the chosen samples, cut to `width` tokens."""

        def cut(table: torch.Tensor | None) -> torch.Tensor | None:
            return None if table is None else table[chosen, :width]

        return LossTerms(
            behaviour=self.behaviour[chosen, :width],
            mask=self.mask[chosen, :width],
            shares=self.shares[chosen, :width],
            advantages=self.advantages[chosen],
            old=cut(self.old),
            reference=cut(self.reference),
        )


def shares(mask: torch.Tensor, algorithm: Algorithm, *, longest: int) -> torch.Tensor:
    """Return the share of each token in the loss: [N, T] → [N, T]."""
    lengths = mask.sum(1, keepdim=True)  # [N, 1]
    samples = (lengths > 0).sum().clamp(min=1)
    match algorithm.loss_aggregation:
        case "sequence":
            return mask / lengths.clamp(min=1) / samples
        case "token":
            return mask / lengths.sum().clamp(min=1)
        case "constant":
            return mask / (samples * longest)


def policy_loss(
    current: torch.Tensor, terms: LossTerms, algorithm: Algorithm, entropy: torch.Tensor | None = None
) -> tuple[torch.Tensor, Metrics]:
    """Return the loss of the samples, and its metrics; `current` is log π_θ [N, T], with gradient.

    `entropy`, that of π_θ at each token [N, T], is needed only for the entropy bonus.
    """
    correction, mask = algorithm.correction, terms.mask
    current, behaviour = _judged(current, mask), _judged(terms.behaviour, mask)
    old = current.detach() if terms.old is None else _judged(terms.old, mask)
    distance = (old - behaviour).clamp(-NATS_MAX, NATS_MAX)  # [N, T] log π_old/μ
    proximal = behaviour if correction.mode == "bypass" else old
    weight = _weights(distance, correction)  # [N, T] ρ_t
    log_ratio = _at_level(current - proximal, mask, algorithm).clamp(-NATS_MAX, NATS_MAX)  # [N, T] or [N, 1] log r_t
    gain, clipped = _gain(log_ratio, current, terms.advantages[:, None], algorithm)
    keep = torch.ones_like(mask) if correction.mode == "none" else kept(distance, mask, correction)

    loss = -(terms.shares * keep * weight * gain).sum()
    metrics = ratio_metrics(distance, mask, weight, keep)
    metrics |= clipping_metrics(clipped, terms.advantages[:, None], mask)
    if terms.reference is not None:
        away = (_judged(terms.reference, mask) - current).clamp(-NATS_MAX, NATS_MAX)  # log π_ref/π_θ
        divergence = away.expm1() - away  # [N, T] k3_t
        loss = loss + algorithm.beta * (terms.shares * keep * divergence).sum()
        metrics["kl/ref"] = mean(divergence.detach(), mask)
    if algorithm.entropy_bonus and entropy is not None:
        loss = loss - algorithm.entropy_bonus * (terms.shares * keep * _judged(entropy, mask)).sum()
    return loss, metrics | {"loss": float(loss.detach())}


def _judged(logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask > 0, logprobs, 0.0)


def _weights(distance: torch.Tensor, correction: Correction) -> torch.Tensor:
    if correction.mode != "decoupled":
        return torch.ones_like(distance)
    if correction.level == "sequence":
        distance = distance.sum(1, keepdim=True).clamp(-NATS_MAX, NATS_MAX).expand_as(distance)
    return distance.exp().clamp(max=correction.token_cap)


def _at_level(log_ratio: torch.Tensor, mask: torch.Tensor, algorithm: Algorithm) -> torch.Tensor:
    match algorithm.importance_sampling_level:
        case "token":
            return log_ratio
        case "sequence":
            return log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        case "product":
            return log_ratio.sum(1, keepdim=True)


def _gain(
    log_ratio: torch.Tensor, current: torch.Tensor, advantage: torch.Tensor, algorithm: Algorithm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gain_t, and whether its ratio was clipped."""
    ratio = log_ratio.exp()
    if algorithm.clip == "cispo":
        truncated = ratio.detach().clamp(max=algorithm.epsilon_high)
        return truncated * advantage * current, (ratio > algorithm.epsilon_high) & (advantage > 0)
    bounded = ratio.clamp(1 - algorithm.epsilon, 1 + algorithm.epsilon_high)
    free = ratio.clamp(max=algorithm.delta)
    return torch.minimum(free * advantage, bounded * advantage), ratio * advantage > bounded * advantage


def kept(distance: torch.Tensor, mask: torch.Tensor, correction: Correction) -> torch.Tensor:
    """Return 1.0 for tokens that are trained on: [N, T] → [N, T]."""
    geometric = (distance.sum(1) / mask.sum(1).clamp(min=1)).exp()
    near = (geometric >= correction.sequence_low) & (geometric <= correction.sequence_high)
    ratio = distance.exp()
    sane = ((ratio >= correction.veto) & (ratio * correction.veto <= 1)).all(1)
    within = (ratio >= correction.token_low) & (ratio <= correction.token_high)
    return ((near & sane)[:, None] & within).float()


def ratio_metrics(distance: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor, keep: torch.Tensor) -> Metrics:
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
        "is/ratio_p01": _quantile(ratio, 0.01),
        "is/ratio_p99": _quantile(ratio, 0.99),
        "is/chi2": float(ratio.square().mean()) - 1.0,
        "is/ess": float(weights.sum().square() / (weights.square().sum() * len(weights))),
        "is/masked_frac": 1.0 - mean(keep, mask) if bool(judged.any()) else 0.0,
        "kl/k1": -float(seen.mean()),
        "kl/k3": float((seen.expm1() - seen).mean()),
    }


def _quantile(values: torch.Tensor, share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed, as `torch.quantile` has a limit."""
    return float(values.kthvalue(max(1, ceil(share * len(values)))).values)


def clipping_metrics(clipped: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> Metrics:
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
