"""The learner on CUDA: updates equal those of the CPU, versions load anywhere, and memory is what was predicted."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, Qwen3Config

from bench.gpu.learner import Load
from coordinator.learner.memory import Estimate, LargestBatch, Simulations
from coordinator.learner.objective import Metrics
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.settings import TrainSettings
from swarm_exact.merging import CARD_PIECE, dithered
from swarm_node.engine.torch.engine import TorchEngine
from tests.gpu.conftest import SIZES
from tests.gpu.training import BATCH
from tests.tiny_policy import make_other_policy

SETTINGS = TrainSettings(learning_rate=1e-4, warmup_updates=1, max_completion_length=64)

WAYS = {
    "all weights": SETTINGS,
    "adapters": replace(SETTINGS, lora_rank=8),
    "bf16 products": replace(SETTINGS, dtype="bfloat16"),
    "bf16 moments": replace(SETTINGS, optimizer_dtype="bfloat16"),
    "moments on the host": replace(SETTINGS, optimizer_offload=True),
    "recomputed layers": replace(SETTINGS, gradient_checkpointing=True, micro_batch_tokens=256),
}


def updated(folder: Path, settings: TrainSettings, out: Path) -> Metrics:
    """Make two updates, publish, and return the metrics of the last."""
    policy = TrainedPolicy(folder, settings)
    steps = [policy.train_step(BATCH) for _ in range(2)]
    policy.writer.save_hub(out)
    return steps[-1].metrics


@pytest.mark.parametrize("way", WAYS)
def test_an_update_is_that_of_the_cpu(policy: Path, device: str, way: str, tmp_path: Path) -> None:
    settings = WAYS[way]
    slack = 0.05 if settings.dtype == "bfloat16" else 1e-3
    on_cpu = updated(policy, settings, tmp_path / "cpu")
    on_device = updated(policy, replace(settings, device=device), tmp_path / "device")
    for name in ("loss", "learner/grad_norm"):
        assert on_device[name] == pytest.approx(on_cpu[name], rel=slack, abs=slack), name
    ours, theirs = (load_file(next((tmp_path / place).glob("*.safetensors"))) for place in ("device", "cpu"))
    for name, weight in ours.items():
        torch.testing.assert_close(weight.float(), theirs[name].float(), rtol=0.02, atol=1e-3)


def test_a_published_version_loads_with_its_canary(policy: Path, device: str, tmp_path: Path) -> None:
    updated(policy, replace(SETTINGS, device=device), tmp_path)
    for dtype in ("float32", "bfloat16"):
        TorchEngine(device=device, dtype=dtype).load(tmp_path, 1)


def test_weights_are_rounded_to_the_bits_of_the_cpu(device: str) -> None:
    rows = 0.05 * torch.randn(3, CARD_PIECE // 2 + 7, generator=torch.Generator().manual_seed(0))
    rows[0, :3] = torch.tensor([float("inf"), -float("inf"), 0.0])
    assert torch.equal(dithered("w", rows.to(device), 5).cpu(), dithered("w", rows, 5))


def test_a_checkpoint_resumes_to_the_bit(policy: Path, device: str, tmp_path: Path) -> None:
    settings = replace(SETTINGS, device=device)
    first = TrainedPolicy(policy, settings)
    first.train_step(BATCH)
    first.save(tmp_path)
    second = TrainedPolicy(policy, settings)
    second.restore(next(tmp_path.iterdir()))
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("way", WAYS)
def test_an_update_is_made_again_to_the_bit(policy: Path, device: str, way: str) -> None:
    """Auditors replay updates. The samples of a group share a prompt, to whose end each adds its gradient."""
    made = [TrainedPolicy(policy, replace(WAYS[way], device=device)) for _ in range(2)]
    metrics = [[one.train_step(BATCH).metrics for _ in range(2)] for one in made]
    assert metrics[0] == metrics[1]
    assert made[0].rooting()() == made[1].rooting()()


@pytest.mark.parametrize("way", WAYS)
def test_memory_is_what_the_preflight_predicts(device: str, way: str, tmp_path: Path) -> None:
    on_card = device == "cuda"
    large = {"hidden_size": 1024, "num_hidden_layers": 12, "intermediate_size": 4096, "vocab_size": 32_000}
    written = Qwen3Config(**{**SIZES, **(large if on_card else {})}, head_dim=32, tie_word_embeddings=True)
    folder = make_other_policy(tmp_path / "policy", written, dtype=torch.bfloat16)
    length = 512 if on_card else 32  # a CPU shows only that all of it runs
    load = Load(groups=4, samples=4, prompt=length // 4, completion=(length, length), micro_batch_tokens=4 * length)
    settings = replace(
        WAYS[way], device=device, max_completion_length=length, micro_batch_tokens=load.micro_batch_tokens
    )
    config = AutoConfig.from_pretrained(folder)
    batch = LargestBatch(load.groups, load.samples, load.prompt)
    predicted = Estimate(Simulations(config), settings, batch).footprint(1, device=device).peak_bytes
    if on_card:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    policy = TrainedPolicy(folder, settings)
    for seed in range(2):
        policy.train_step(load.batch(config.vocab_size, seed))
    policy.writer.save_hub(tmp_path / "out")
    if not on_card:
        pytest.skip("only a CUDA device counts what it allocates")
    assert torch.cuda.max_memory_allocated() == pytest.approx(predicted, rel=0.1)
