"""Policies as the learner publishes them with adapters: a base, and what was learned beside it."""

import shutil
from pathlib import Path

import torch

from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.settings import TrainSettings
from coordinator.model import adapter_files

SETTINGS = TrainSettings(learning_rate=1e-3, lora_rank=4, lora_alpha=8.0)


def make_adapted(policy: Path, target: Path, *, seed: int) -> Path:
    """A version of this policy with an adapter that changes what it says; the base is that of every seed."""
    learner = TrainedPolicy(policy, SETTINGS)
    random = torch.Generator().manual_seed(seed)
    assert learner._adapters
    for up in learner._adapters.up:
        up.data = torch.randn(up.shape, generator=random) * 0.05
    learner.writer.save_base(target)
    learner.writer.save_adapter(target, "a base")
    return target


def make_merged(adapted: Path, target: Path) -> Path:
    """Write the adapted version as one policy."""
    shutil.copytree(adapted, target)
    adapter_files.merge(target)
    return target
