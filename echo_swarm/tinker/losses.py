"""Tinker's losses: sums over tokens, not means.

With π the policy in training, μ the version that sampled (`logprobs`), r = π / μ, A the advantage, and w the weight:

    cross_entropy         − Σ w · log π
    importance_sampling   − Σ r · A
    ppo                   − Σ min(r · A, clip(r) · A)             clip from clip_low_threshold to clip_high_threshold
    cispo                 − Σ clip(r) · A · log π                 no gradient through clip(r)
    dro                   − Σ (A · log π − beta / 2 · log²(r))

- Tokens with the advantage 0 add nothing, whatever their log-probabilities: prompts have zeros there. `dro` has a term
  that does not depend on A, and counts a token with the advantage 0 and the log-probability 0 as one of a prompt.
- A batch is padded: `inside` is 1 for tokens of an example.
- Sums make gradients of several requests add up. The learner's objective (`coordinator.learner.objective`) weighs
  tokens by their share in a batch that it knows as a whole, so it cannot be used here.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from protocol.errors import FieldRefused, NonFiniteNumber

Inputs = Mapping[str, torch.Tensor]
"""Tensors [N, T] by the names that Tinker gives them, and `inside`."""

NOT_OFFERED = {
    "gspo": "its ratio is one of whole sequences",
    "stable_reinforce": "it needs records that the sampler keeps, and nodes keep none",
    "custom": "losses are not uploaded; forward_backward_custom computes them at the client",
}
"""Losses of Tinker that are refused, and why."""


@dataclass(frozen=True)
class TinkerLoss:
    """A loss: the inputs it needs, its settings with their defaults, and its sum."""

    compute: Callable[[torch.Tensor, Inputs, Mapping[str, float]], torch.Tensor]
    required: frozenset[str]
    optional: frozenset[str] = frozenset()
    settings: Mapping[str, float | None] | None = None
    """Default values; None: must be given."""


def _cross_entropy(logprobs: torch.Tensor, inputs: Inputs, _: Mapping[str, float]) -> torch.Tensor:
    weights = inputs.get("weights", inputs["inside"])
    return -(torch.where(weights != 0, logprobs, 0.0) * weights).sum()


def _log_ratio(logprobs: torch.Tensor, inputs: Inputs, counted: torch.Tensor) -> torch.Tensor:
    return torch.where(counted, logprobs - inputs["logprobs"], 0.0)


def _importance_sampling(logprobs: torch.Tensor, inputs: Inputs, _: Mapping[str, float]) -> torch.Tensor:
    advantages = inputs["advantages"]
    return -(_log_ratio(logprobs, inputs, advantages != 0).exp() * advantages).sum()


def _clipped(ratio: torch.Tensor, settings: Mapping[str, float]) -> torch.Tensor:
    return ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])


def _ppo(logprobs: torch.Tensor, inputs: Inputs, settings: Mapping[str, float]) -> torch.Tensor:
    advantages = inputs["advantages"]
    ratio = _log_ratio(logprobs, inputs, advantages != 0).exp()
    return -torch.minimum(ratio * advantages, _clipped(ratio, settings) * advantages).sum()


def _cispo(logprobs: torch.Tensor, inputs: Inputs, settings: Mapping[str, float]) -> torch.Tensor:
    advantages = inputs["advantages"]
    ratio = _log_ratio(logprobs.detach(), inputs, advantages != 0).exp()
    return -(_clipped(ratio, settings) * advantages * torch.where(advantages != 0, logprobs, 0.0)).sum()


def _dro(logprobs: torch.Tensor, inputs: Inputs, settings: Mapping[str, float]) -> torch.Tensor:
    advantages = inputs["advantages"]
    counted = (advantages != 0) | (inputs["logprobs"] != 0)
    gain = advantages * torch.where(advantages != 0, logprobs, 0.0)
    return -(gain - settings["beta"] / 2 * _log_ratio(logprobs, inputs, counted).square()).sum()


_POLICY = frozenset({"target_tokens", "logprobs", "advantages"})

LOSSES = {
    "cross_entropy": TinkerLoss(_cross_entropy, frozenset({"target_tokens"}), frozenset({"weights"})),
    "importance_sampling": TinkerLoss(_importance_sampling, _POLICY),
    "ppo": TinkerLoss(_ppo, _POLICY, settings={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": TinkerLoss(_cispo, _POLICY, settings={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": TinkerLoss(_dro, _POLICY, settings={"beta": None}),
}
"""The losses that are offered. The defaults are those that Tinker documents."""


def find_loss(name: str) -> TinkerLoss:
    """Return a loss by its name."""
    if (found := LOSSES.get(name)) is not None:
        return found
    if name in NOT_OFFERED:
        raise FieldRefused(f"The loss {name} is not offered: {NOT_OFFERED[name]}.", hint=f"Use {_offered()}.")
    raise FieldRefused(f"There is no loss {name[:40]!r}.", hint=f"Use {_offered()}.")


def _offered() -> str:
    return ", ".join(sorted(LOSSES))


def read_settings(name: str, given: Mapping[str, float]) -> dict[str, float]:
    """Return all settings of a loss: those that were given, and the defaults of the others."""
    known = find_loss(name).settings or {}
    if unknown := sorted(given.keys() - known.keys()):
        raise FieldRefused(
            f"loss_fn_config has {unknown[0][:40]!r}, which the loss {name} does not know.",
            hint=f"It knows {', '.join(sorted(known))}." if known else "It has no settings.",
        )
    merged = {**known, **given}
    settings = {key: value for key, value in merged.items() if value is not None}
    if missing := sorted(merged.keys() - settings.keys()):
        raise FieldRefused(f"The loss {name} needs loss_fn_config[{missing[0]!r}].")
    if wrong := [key for key, value in settings.items() if not math.isfinite(value) or value < 0]:
        raise NonFiniteNumber(f"loss_fn_config[{wrong[0]!r}] must be a number that is 0 or above.")
    if settings.get("clip_low_threshold", 0.0) > settings.get("clip_high_threshold", 0.0):
        raise FieldRefused("clip_low_threshold is above clip_high_threshold.")
    return settings


def require_inputs(name: str, place: str, given: frozenset[str]) -> None:
    """Refuse an example that lacks an input of the loss, or has one that the loss does not know."""
    found = find_loss(name)
    if missing := sorted(found.required - given):
        raise FieldRefused(f"{place} has no {missing[0]}, which the loss {name} needs.")
    if unknown := sorted(given - found.required - found.optional):
        raise FieldRefused(
            f"{place} has {unknown[0][:40]!r}, which the loss {name} does not use.",
            hint="Leave it out of loss_fn_inputs.",
        )
