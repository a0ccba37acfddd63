"""Two cards train what one trains: FSDP2 over NCCL, started as a round starts it."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from coordinator.learner import checkpoint, launch
from coordinator.learner.policy import TrainedPolicy
from tests.gpu.rank import UPDATES
from tests.gpu.test_learner import SETTINGS
from tests.gpu.training import BATCH

RANKS = 2


@pytest.mark.processes
@pytest.mark.slow  # on processors it repeats tests/coordinator/learner/test_ranks.py; on cards every test runs
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks need two cards")
def test_two_ranks_train_what_one_process_trains(qwen3: Path, device: str, tmp_path: Path) -> None:
    settings = replace(SETTINGS, device=device, micro_batch_tokens=256)
    alone = TrainedPolicy(qwen3, settings)
    for _ in range(UPDATES):
        alone.train_step(BATCH)
    alone.writer.save_hub(tmp_path / "alone")
    words = [sys.executable, "-P", "-m", "tests.gpu.rank", str(qwen3), str(tmp_path / "together"), device]
    assert launch.launch(words, RANKS, tmp_path / "ranks") == 0
    theirs, ours = (load_file(tmp_path / place / "model.safetensors") for place in ("together/hub", "alone"))
    for name, weight in ours.items():
        torch.testing.assert_close(weight.float(), theirs[name].float(), rtol=0.02, atol=1e-3)
    resumed, last = TrainedPolicy(qwen3, settings), checkpoint.newest(tmp_path / "together" / "checkpoints")
    assert last is not None
    resumed.restore(last)
    assert resumed.update == UPDATES
