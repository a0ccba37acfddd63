"""An update of several optimizer steps against a loop that is written another way: one sample at a time, no packing."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from coordinator.learner import checkpoint
from coordinator.learner.algorithm import PRESETS, Algorithm, Correction
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.settings import TrainSettings
from tests.coordinator.learner.groups import group

ALL = Correction(mode="decoupled", sequence_low=0.0, sequence_high=1e9, veto=0.0)
SETTINGS = TrainSettings(learning_rate=3e-3, warmup_updates=1, eps=1e-3, max_completion_length=6)
"""Settings with a larger eps than usual: else Adam makes a whole step of what is only a rounding of a gradient."""

TEXTS = (
    ([19, 20, 31], [([21, 22, 2], -5.7, 1.0), ([23, 2], -5.9, 0.0), ([24, 2], -6.4, 0.0)]),
    ([19, 20, 13, 21, 31], [([2], -6.4, 0.0), ([24, 25, 26, 2], -5.5, 1.0)]),
    ([31], [([21, 2], -4.4, 0.0), ([22, 2], -5.9, 0.5), ([22, 23, 2], -6.3, 1.0)]),
    ([13, 31], [([19, 2], -5.9, 1.0), ([20, 19, 2], -5.2, 0.0)]),
    ([14, 31], [([19, 2], -5.3, 1.0), ([20, 19, 18, 2], -6.2, 0.0)]),
)
GROUPS = tuple(
    group(number, prompt, [(tokens, [logprob] * len(tokens), reward) for tokens, logprob, reward in completions])
    for number, (prompt, completions) in enumerate(TEXTS)
)
"""Five groups: three in the first of two parts, two in the second."""

Loss = Callable[[Any, list["Said"]], torch.Tensor]
"""The loss of a model and some samples."""


class Said:
    """A sample in plain numbers."""

    def __init__(self, model: Any, number: int, prompt: list[int], tokens: list[int], mu: float, advantage: float):
        self.number, self.prompt, self.tokens = number, prompt, torch.tensor(tokens)
        self.behaviour, self.advantage = torch.full((len(tokens),), mu), advantage
        self.old = self.logprobs(model).detach()

    def logits(self, model: Any) -> torch.Tensor:
        text = torch.cat([torch.tensor(self.prompt), self.tokens])
        found: torch.Tensor = model(text[None], use_cache=False).logits[0, len(self.prompt) - 1 : -1].float()
        return found

    def logprobs(self, model: Any) -> torch.Tensor:
        return self.logits(model).log_softmax(-1).gather(1, self.tokens[:, None])[:, 0]

    def weight(self) -> torch.Tensor:
        return (self.old - self.behaviour).exp().clamp(max=2.0)


def plain_samples(model: Any) -> list[Said]:
    """All samples of `TEXTS`, with advantages in units of their group's deviation."""
    found = []
    for number, (prompt, completions) in enumerate(TEXTS):
        rewards = torch.tensor([reward for _, _, reward in completions])
        advantages = (rewards - rewards.mean()) / rewards.std(correction=0)
        found += [
            Said(model, number, prompt, tokens, mu, float(advantage))
            for (tokens, mu, _), advantage in zip(completions, advantages, strict=True)
        ]
    return found


def gspo(model: Any, samples: list[Said]) -> torch.Tensor:
    total = torch.zeros(())
    for said in samples:
        logprobs = said.logprobs(model)
        ratio = (logprobs - said.old).mean().exp()
        bounded = ratio.clamp(1 - 3e-4, 1 + 4e-4)
        gain = torch.minimum(ratio * said.advantage, bounded * said.advantage)
        total = total - (said.weight() * gain).mean() / len(samples)
    return total


def cispo(model: Any, samples: list[Said]) -> torch.Tensor:
    total = torch.zeros(())
    for said in samples:
        logprobs = said.logprobs(model)
        ratio = (logprobs - said.old).exp().detach().clamp(max=5.0)
        total = total - (said.weight() * ratio * said.advantage * logprobs).sum()
    return total / sum(len(said.tokens) for said in samples)


def clip_higher(model: Any, samples: list[Said]) -> torch.Tensor:
    total = torch.zeros(())
    for said in samples:
        logprobs = said.logprobs(model)
        ratio = (logprobs - said.old).exp()
        gain = torch.minimum(ratio * said.advantage, ratio.clamp(0.8, 1.28) * said.advantage)
        total = total - (said.weight() * gain).sum()
    return total / sum(len(said.tokens) for said in samples)


def grpo(model: Any, samples: list[Said], weigh: Callable[[Said], torch.Tensor] = Said.weight) -> torch.Tensor:
    total = torch.zeros(())
    for said in samples:
        ratio = (said.logprobs(model) - said.old).exp()
        gain = torch.minimum(ratio * said.advantage, ratio.clamp(0.8, 1.28) * said.advantage)
        total = total - (weigh(said) * gain).mean() / len(samples)
    return total


def icepop(said: Said) -> torch.Tensor:
    """IcePop: a token counts by its ratio within bounds, and not at all beyond them."""
    ratio = (said.old - said.behaviour).exp()
    return torch.where((ratio >= 0.5) & (ratio <= 1.5), ratio, torch.zeros(()))


def truncated_product(said: Said) -> torch.Tensor:
    """Truncated importance sampling of sequences: one weight, the product of the ratios."""
    return torch.full_like(said.old, min(exp(float((said.old - said.behaviour).sum())), 3.0))


def with_entropy(model: Any, samples: list[Said]) -> torch.Tensor:
    total = grpo(model, samples)
    for said in samples:
        scores = said.logits(model).log_softmax(-1)
        total = total + 0.3 * (scores.exp() * scores).sum(1).mean() / len(samples)
    return total


def decay_groups(model: Any, settings: TrainSettings) -> list[dict[str, Any]]:
    """Group single weights: all matrices of this policy end in `proj.weight`, except its embedding."""
    return [
        {
            "params": [weight],
            "weight_decay": settings.weight_decay if name.endswith("proj.weight") or settings.decayed == "all" else 0.0,
        }
        for name, weight in model.named_parameters()
    ]


def loop(folder: Path, settings: TrainSettings, loss: Loss, parts: int, updates: int = 1) -> dict[str, torch.Tensor]:
    """Return the weights after some updates of `parts` steps on `GROUPS`."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        decay_groups(model, settings), lr=settings.learning_rate, betas=settings.betas, eps=settings.eps
    )
    for _ in range(updates):
        samples = plain_samples(model)
        for _ in range(settings.num_iterations):
            for part in range(parts):
                chosen = [said for said in samples if said.number % parts == part]
                optimizer.zero_grad()
                loss(model, chosen).backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
                torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
                optimizer.step()
    return dict(model.named_parameters())


def furthest(policy: TrainedPolicy, expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of any weight."""
    found = dict(policy.model.named_parameters())
    return max(float((found[name] - expected[name]).abs().max().detach()) for name in expected)


def of_preset(name: str, **changes: Any) -> Algorithm:
    return replace(PRESETS[name], correction=ALL, **changes)


@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.parametrize(
    ("algorithm", "loss"),
    [
        (of_preset("gspo", minibatches=2), gspo),
        (of_preset("cispo", minibatches=2), cispo),
        (of_preset("dapo", minibatches=2), clip_higher),
    ],
    ids=["gspo", "cispo", "dapo"],
)
def test_minibatches_are_steps_on_parts_of_a_batch(
    policy_folder: Path, algorithm: Algorithm, loss: Loss, iterations: int
) -> None:
    settings = replace(SETTINGS, algorithm=algorithm, num_iterations=iterations)
    policy = TrainedPolicy(policy_folder, settings)
    policy.train_step(GROUPS)
    metrics = policy.train_step(GROUPS).metrics
    assert furthest(policy, loop(policy_folder, settings, loss, 2, updates=2)) < 1e-6
    assert furthest(policy, loop(policy_folder, settings, loss, 1, updates=2)) > 1e-4, "parts make a difference"
    assert policy.update == 2
    assert metrics["is/ratio_mean"] != pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(
    ("algorithm", "loss"),
    [
        (
            replace(PRESETS["grpo"], correction=replace(ALL, token_low=0.5, token_high=1.5)),
            partial(grpo, weigh=icepop),
        ),
        (
            replace(PRESETS["grpo"], correction=replace(ALL, level="sequence", token_cap=3.0)),
            partial(grpo, weigh=truncated_product),
        ),
        (of_preset("grpo", entropy_bonus=0.3), with_entropy),
    ],
    ids=["token mask", "sequence weights", "entropy bonus"],
)
def test_parts_of_the_objective(policy_folder: Path, algorithm: Algorithm, loss: Loss) -> None:
    settings = replace(SETTINGS, algorithm=replace(algorithm, minibatches=2))
    policy = TrainedPolicy(policy_folder, settings)
    for _ in range(2):
        policy.train_step(GROUPS)
    assert furthest(policy, loop(policy_folder, settings, loss, 2, updates=2)) < 1e-6
    assert furthest(policy, loop(policy_folder, settings, grpo, 2, updates=2)) > 1e-4, "it makes a difference"


def test_the_entropy_bonus_raises_the_entropy(policy_folder: Path) -> None:
    """All samples earn the same, so only entropy is learned."""
    even = GROUPS[0].model_copy(
        update={"samples": tuple(sample.model_copy(update={"reward": 1.0}) for sample in GROUPS[0].samples)}
    )
    policy = TrainedPolicy(policy_folder, replace(SETTINGS, algorithm=of_preset("grpo", entropy_bonus=1.0)))
    found = [policy.train_step([even]).metrics["entropy"] for _ in range(4)]
    assert found == sorted(found)
    assert found[-1] > found[0]


@pytest.mark.parametrize("decayed", ["matrices", "all"])
def test_adams_settings_are_those_of_the_operator(policy_folder: Path, decayed: Any) -> None:
    """Norms and the embedding do not shrink, unless all is to."""
    settings = replace(
        SETTINGS, betas=(0.7, 0.8), eps=1e-3, weight_decay=10.0, decayed=decayed, algorithm=of_preset("grpo")
    )
    policy = TrainedPolicy(policy_folder, settings)
    for _ in range(3):
        policy.train_step(GROUPS)
    assert furthest(policy, loop(policy_folder, settings, grpo, 1, updates=3)) < 1e-6
    other: Any = "all" if decayed == "matrices" else "matrices"
    assert furthest(policy, loop(policy_folder, replace(settings, decayed=other), grpo, 1, updates=3)) > 1e-3


def test_dropped_tokens_are_counted(policy_folder: Path) -> None:
    correction = replace(ALL, token_low=0.5, token_high=1.5)
    policy = TrainedPolicy(policy_folder, replace(SETTINGS, algorithm=replace(PRESETS["grpo"], correction=correction)))
    masked = policy.train_step(GROUPS).metrics["is/masked_frac"]
    model: Any = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)
    weights = torch.cat([icepop(said) for said in plain_samples(model)])
    assert masked == pytest.approx(float((weights == 0).float().mean()))
    assert 0 < masked < 1


def test_the_clip_acts_within_a_batch_only_where_it_is_split(policy_folder: Path) -> None:
    clipped = [
        step["clip/low"] + step["clip/high"]
        for parts in (1, 5)
        for step in [
            TrainedPolicy(policy_folder, replace(SETTINGS, algorithm=of_preset("gspo", minibatches=parts)))
            .train_step(GROUPS)
            .metrics
        ]
    ]
    assert clipped[0] == 0.0
    assert clipped[1] > 0.1


def test_what_the_policy_said_before_the_update_is_what_is_reported(policy_folder: Path) -> None:
    """Distances, entropy and ratios are those before the first step, however many follow."""
    once, split = (
        TrainedPolicy(policy_folder, replace(SETTINGS, algorithm=of_preset("grpo", minibatches=parts))).train_step(
            GROUPS
        )
        for parts in (1, 3)
    )
    assert split.distances == pytest.approx(once.distances, abs=1e-6)
    for name in ("entropy", "is/ratio_mean", "kl/k3", "is/ess", "reward/taught"):
        assert split.metrics[name] == pytest.approx(once.metrics[name], abs=1e-6), name


def test_a_resumed_learner_makes_the_same_steps_bit_for_bit(policy_folder: Path, tmp_path: Path) -> None:
    settings = replace(SETTINGS, algorithm=of_preset("gspo", minibatches=2), warmup_updates=3)
    policy = TrainedPolicy(policy_folder, settings)
    policy.train_step(GROUPS)
    policy.save(tmp_path)
    resumed = TrainedPolicy(policy_folder, settings)
    last = checkpoint.newest(tmp_path)
    assert last
    resumed.restore(last)
    steps = [one.train_step(GROUPS) for one in (policy, resumed)]
    assert steps[0] == steps[1]
    for ours, theirs in zip(policy.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_more_minibatches_than_groups_are_as_many_as_there_are(policy_folder: Path) -> None:
    assert (
        TrainedPolicy(policy_folder, replace(SETTINGS, algorithm=of_preset("grpo", minibatches=9)))
        .train_step(GROUPS[:2])
        .metrics["learner/grad_norm"]
    )
