"""Policies small enough to load and run in milliseconds, for the tests of the engine and of the learner."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from coordinator.learner.embedded import EmbeddedShape, make_policy, make_tokenizer
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.settings import TrainSettings
from protocol.policy.canary import FILE_NAME

TINY = EmbeddedShape(hidden=32, layers=2, heads=2, intermediate=48)


def make_tiny_policy(folder: Path, *, seed: int = 1) -> Path:
    """An untrained policy in hub format."""
    make_policy(folder, seed=seed, shape=TINY)
    return with_canary(folder)


def make_other_policy(folder: Path, config: Any, *, dtype: torch.dtype, part_size: str = "1GB") -> Path:
    """Make an untrained policy of any configuration as a learner publishes it, in files of this size."""
    return with_canary(make_start(folder, config, dtype=dtype, part_size=part_size))


def make_start(folder: Path, config: Any, *, dtype: torch.dtype, part_size: str = "1GB") -> Path:
    """Make an untrained policy without a canary: a learner starts from it, and only engines need one."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]  # transformers annotates half
    model.to(dtype).save_pretrained(folder, max_shard_size=part_size)
    make_tokenizer().save_pretrained(folder)
    return folder


def with_canary(folder: Path) -> Path:
    """Add the canary with which the learner publishes such a policy."""
    with tempfile.TemporaryDirectory() as published:
        TrainedPolicy(folder, TrainSettings(learning_rate=1e-3)).writer.save_hub(Path(published))
        shutil.copyfile(Path(published) / FILE_NAME, folder / FILE_NAME)
    return folder
