"""A program for `coordinator.learner.launch`: makes updates as one of several ranks, and publishes the policy."""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.ranks import Ranks
from tests.gpu.test_learner import SETTINGS
from tests.gpu.training import BATCH

UPDATES = 2


def main(policy: str, out: str, device: str) -> None:
    torch.set_num_threads(1)
    ranks = Ranks(device)
    trained = TrainedPolicy(Path(policy), replace(SETTINGS, device=device, micro_batch_tokens=256), ranks)
    for _ in range(UPDATES):
        trained.train_step(BATCH)
    trained.save(Path(out) / "checkpoints")
    trained.writer.save_hub(Path(out) / "hub")
    ranks.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
