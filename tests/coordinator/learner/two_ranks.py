"""A program of two ranks: trains the policies of `SCENARIOS`, and leaves what came of it.

Its arguments are a policy folder, one for what one process did before, and one for the results.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from coordinator.learner import checkpoint
from coordinator.learner.algorithm import PRESETS, Algorithm
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.ranks import Ranks
from coordinator.learner.settings import TrainSettings
from tests.coordinator.learner.forked_ranks import forked
from tests.coordinator.learner.groups import UNEQUAL

PLAIN = TrainSettings(learning_rate=1e-3, warmup_updates=1, algorithm=PRESETS["echo2"])  # which drops no sample
SCENARIOS = {
    "plain": PLAIN,
    "by all means": replace(
        PLAIN,
        micro_batch_tokens=6,
        num_iterations=2,
        gradient_checkpointing=True,
        algorithm=Algorithm(beta=0.1, correction=PRESETS["echo2"].correction),
    ),
    "adapters": replace(PLAIN, lora_rank=4, learning_rate=1e-2),
    "minibatches": replace(
        PLAIN, micro_batch_tokens=6, algorithm=replace(PLAIN.algorithm, minibatches=2, epsilon=0.01, epsilon_high=0.01)
    ),
    "bf16": replace(PLAIN, dtype="bfloat16"),
    "sent back": replace(PLAIN, warmup_updates=4, schedule="linear", max_updates=8),
}
SENT_BACK_AT = 3
"""Updates until this policy's own first version is taken; its checkpoint is one of the second rise of the rate."""
UPDATES = 5
BATCHES = [UNEQUAL, UNEQUAL[:2], UNEQUAL[1:], UNEQUAL[2:], UNEQUAL, UNEQUAL[:1]]
"""Batches: nobody learns anything of the fourth, and in the last there are fewer samples than pieces could be."""


def train(folder: Path, settings: TrainSettings, results: Path, ranks: Ranks, resumed: Path | None = None) -> None:
    """Some updates, a checkpoint, one update more; and the policy as it is then published."""
    policy = TrainedPolicy(folder, settings, ranks)
    if resumed:
        policy.restore(resumed)
    metrics = []
    sent_back = results.name == "sent back"
    if sent_back:
        policy.writer.save_hub(results / "first")
    while policy.update < UPDATES:
        if sent_back and policy.update == SENT_BACK_AT:
            policy.continue_from(results / "first")
        metrics.append(policy.train_step(BATCHES[policy.update]).metrics)
    policy.save(results / "checkpoints")
    policy.writer.save_hub(results / "fifth")
    if settings.lora_rank:
        policy.writer.save_base(results / "base")
        policy.writer.save_adapter(results / "adapter")
    metrics.append(policy.train_step(BATCHES[policy.update]).metrics)
    policy.writer.save_hub(results / "sixth")
    if ranks.first:
        (results / "metrics.json").write_text(json.dumps(metrics))


def train_all(folder: Path, before: Path, results: Path) -> None:
    """Train every policy as one of the ranks, and once more from the checkpoint of what one process did before."""
    ranks = Ranks()
    for name, settings in SCENARIOS.items():
        train(folder, settings, results / name, ranks)
        last = checkpoint.newest(before / name / "checkpoints")
        train(folder, settings, results / f"{name}, resumed", ranks, last)
    ranks.leave()


def main(*folders: Path) -> None:
    torch.set_num_threads(1)
    assert forked(2, train_all, *folders) == [0, 0]


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
