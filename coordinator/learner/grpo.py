"""The loss: group-relative advantages, and a clipped policy gradient that is corrected for stale samples.

With μ the version that sampled, π_θ the policy in training, and π_prox the centre of the trust region:

    ρ_t = π_prox / μ             behaviour ratio: how far the samples are from the centre
    r_t = π_θ / π_prox           trust-region ratio: how far the update has moved
    loss = − Σ_t keep · min(ρ_t, cap) · min(r_t A, clip(r_t, 1 − ε_low, 1 + ε_high) A) / N

- `decoupled`: π_prox is π_θ itself before the update. `bypass`: π_prox is μ, so r_t carries the whole distance and
  the clip bounds it.
- keep drops a whole sample if the geometric mean of π_θ/μ leaves its bounds, or if a single ratio is vetoed as absurd.
- N counts the tokens *before* dropping: otherwise dropping samples would scale the others' gradient up.
- Everything is float32 whatever the model computes in; the sums run over all tokens, so long samples weigh more.
"""

from dataclasses import dataclass
from typing import Literal

import torch

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class LossSettings:
    """One preset; the defaults are those of the large asynchronous systems, but for the wider sequence bounds."""

    correction: Literal["decoupled", "bypass"] = "decoupled"
    clip_low: float = 0.2
    clip_high: float = 0.28
    weight_cap: float = 2.0
    sequence_low: float = 0.5
    """Geometric mean ratio of a sample: tight bounds like 0.99 suit lag 0; a lag of some updates moves further."""
    sequence_high: float = 2.0
    veto: float = 1e-4


def group_advantages(rewards: torch.Tensor, owners: torch.Tensor, groups: int) -> torch.Tensor:
    """(reward − mean of its group) / (deviation of its group): rewards [N], owners [N] → [N].

    A group whose rewards are all equal teaches nothing: its advantages are exactly zero.
    """
    zeros = torch.zeros(groups)
    count = zeros.index_add(0, owners, torch.ones_like(rewards)).clamp(min=1)
    mean = zeros.index_add(0, owners, rewards) / count
    centred = rewards - mean[owners]
    deviation = (zeros.index_add(0, owners, centred.square()) / count).sqrt()
    high = zeros.scatter_reduce(0, owners, rewards, "amax", include_self=False)
    low = zeros.scatter_reduce(0, owners, rewards, "amin", include_self=False)
    # Compared, not computed: the mean of equal rewards may be off by a rounding, which division would blow up.
    return torch.where((high > low)[owners], centred / deviation[owners].clamp(min=1e-6), 0.0)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the tokens and the entropy at each place: [N, T, V], [N, T] → [N, T], [N, T]."""
    scores = torch.log_softmax(logits.float() / temperature, dim=-1)
    entropy = -(scores.detach().exp() * scores.detach()).sum(-1)
    return scores.gather(-1, tokens[..., None])[..., 0], entropy


def policy_loss(
    current: torch.Tensor,  # [N, T] log π_θ, with gradient
    behaviour: torch.Tensor,  # [N, T] log μ
    advantages: torch.Tensor,  # [N]
    mask: torch.Tensor,  # [N, T] 1 = token
    settings: LossSettings,
) -> tuple[torch.Tensor, Metrics]:
    """The loss of one update, and what to watch about it."""
    distance = (current.detach() - behaviour) * mask  # [N, T] log π_θ/μ at the start of the update
    proximal = behaviour if settings.correction == "bypass" else current.detach()
    weight = ((proximal - behaviour) * mask).exp().clamp(max=settings.weight_cap)
    ratio = ((current - proximal) * mask).exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    advantage = advantages[:, None]
    gain = torch.minimum(ratio * advantage, clipped * advantage)

    keep = _kept_samples(distance, mask, settings)[:, None]  # [N, 1]
    tokens = mask.sum()
    loss = -(keep * weight * gain * mask).sum() / tokens

    def mean(values: torch.Tensor) -> float:
        return float((values * mask).sum() / tokens)

    return loss, {
        "loss": float(loss.detach()),
        "clip_share": mean((ratio * advantage > clipped * advantage).float()),
        "dropped_share": 1.0 - mean(keep.expand_as(mask)),
        "ratio_mean": mean(distance.exp()),
        "ratio_max": float(distance.exp().max()),
        "kl": mean(distance.expm1() - distance),  # k3: positive, and small when the samples are fresh
        "effective_samples": float(weight[mask > 0].sum().square() / (weight[mask > 0].square().sum() * tokens)),
    }


def _kept_samples(distance: torch.Tensor, mask: torch.Tensor, settings: LossSettings) -> torch.Tensor:
    """1.0 for samples that are near enough to learn from: [N, T] → [N]."""
    geometric = (distance.sum(1) / mask.sum(1).clamp(min=1)).exp()
    near = (geometric >= settings.sequence_low) & (geometric <= settings.sequence_high)
    sane = ((distance.exp() >= settings.veto) & (distance.exp() <= 1 / settings.veto)).all(1)
    return (near & sane).float()
