"""The torch engine on CUDA: what it draws, which weights it accepts, and a version that takes another's place."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.settings import TrainSettings
from protocol.errors import SwarmError
from swarm_node.engine.torch.engine import TorchEngine
from tests.gpu.sampling import leased, sampled, share_alike
from tests.gpu.training import BATCH

DTYPES = ("float32", "bfloat16", "float16")

ALIKE_MIN = 0.9
"""Sums in another order may turn a draw that lies at a border of two tokens."""


def engine_of(folder: Path, device: str, dtype: str) -> TorchEngine:
    engine = TorchEngine(device=device, dtype=dtype)
    engine.load(folder, 1)  # checks the canary
    return engine


def test_the_device_draws_the_tokens_of_the_cpu(policy: Path, device: str) -> None:
    here, there = (sampled(engine_of(policy, where, "float32"), leased(6)) for where in ("cpu", device))
    assert share_alike(here, there) >= ALIKE_MIN


def test_groups_together_draw_what_each_draws_alone(policy: Path, device: str) -> None:
    engine, leases = engine_of(policy, device, "float32"), leased(4)
    alone = [sampled(engine, [lease])[0] for lease in leases]
    assert share_alike(sampled(engine, leases), alone) >= ALIKE_MIN


@pytest.mark.parametrize("dtype", DTYPES)
def test_sound_weights_pass_the_canary(policy: Path, device: str, dtype: str) -> None:
    assert len(sampled(engine_of(policy, device, dtype), leased(1))[0]) == 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_damaged_projection_is_found(policy: Path, device: str, dtype: str, tmp_path: Path) -> None:
    damaged = shutil.copytree(policy, tmp_path / "damaged")
    weights = load_file(damaged / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    save_file({**weights, name: -weights[name]}, damaged / "model.safetensors", {"format": "pt"})
    with pytest.raises(SwarmError, match="canary"):
        engine_of(damaged, device, dtype)


def test_a_new_version_in_place_draws_what_a_fresh_engine_draws(policy: Path, device: str, tmp_path: Path) -> None:
    learner = TrainedPolicy(policy, TrainSettings(learning_rate=1e-2, warmup_updates=1, max_completion_length=64))
    learner.train_step(BATCH)
    learner.writer.save_hub(tmp_path)
    engine = engine_of(policy, device, "float32")
    before = sampled(engine, leased(3))
    engine.load(tmp_path, 2)
    after = sampled(engine, leased(3), version=2)
    fresh = sampled(engine_of(tmp_path, device, "float32"), leased(3))
    assert share_alike(after, fresh) == 1
    assert share_alike(after, before) < 1
