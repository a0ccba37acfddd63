"""Updates of the learner at the shapes of real models: tokens per second, and the share of the device's arithmetic.

- `TrainedPolicy.train_step` as a round calls it, bf16 products with float32 weights, layers recomputed; random weights,
  and completions of mixed lengths.
- MFU is what the step needs (see `shapes`) over what the data sheet promises for dense bf16 in the same time. Beside it
  stands what a large matrix product reaches in the same run: no step can do better than that.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from bench.gpu.shapes import LearnerShape, configuration, write
from bench.harness import Bench
from coordinator.learner.memory import Estimate, LargestBatch, Simulations
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.settings import TrainSettings
from protocol.work.learning import TrainingGroup, TrainingSample
from protocol.work.rollout import pack_logprobs, pack_tokens

TERA = 1e12

PEAK_TFLOPS = {
    "H200": 989,
    "H100 PCIe": 756,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "RTX 4090": 165,
    "L4": 121,
    "A10": 125,
}
"""Dense bf16 by the data sheets, the longer names before those that they hold."""

MOMENTS: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
"""Precisions of the optimizer's moments: the first with which a shape fits is measured."""

EXTENT = 8192
"""The extent of the matrix product; 256 MiB of operands."""


@dataclass(frozen=True)
class Load:
    """The size of a training step."""

    groups: int = 8
    samples: int = 8
    prompt: int = 256
    completion: tuple[int, int] = (128, 1024)
    micro_batch_tokens: int = 16_384

    def batch(self, vocabulary: int, seed: int) -> list[TrainingGroup]:
        """Random tokens, rewards that differ."""
        random = np.random.default_rng(seed)

        def tokens(count: int) -> bytes:
            return pack_tokens(random.integers(3, vocabulary, count).tolist())

        return [
            TrainingGroup(
                claim_id=f"{number:064x}",
                prompt=tokens(self.prompt),
                policy_update=0,
                samples=tuple(
                    TrainingSample(
                        tokens=tokens(length),
                        logprobs=pack_logprobs([-float(np.log(vocabulary))] * length),
                        reward=float(place % 2),
                    )
                    for place, length in enumerate(
                        map(int, random.integers(self.completion[0], self.completion[1] + 1, self.samples))
                    )
                ),
            )
            for number in range(self.groups)
        ]


SMALL = Load(groups=2, samples=4, prompt=16, completion=(4, 12), micro_batch_tokens=128)


def peak_tflops(device: str) -> float | None:
    """Return the peak in TFLOPS from the data sheet of a device, or None if it is unknown."""
    return next((float(peak) for name, peak in PEAK_TFLOPS.items() if name in device), None)


def settings_of(load: Load, device: str, moments: Literal["float32", "bfloat16"]) -> TrainSettings:
    """Return the settings with which a large model is trained whole."""
    return TrainSettings(
        learning_rate=1e-6,
        micro_batch_tokens=load.micro_batch_tokens,
        gradient_checkpointing=True,
        dtype="bfloat16",
        optimizer_dtype=moments,
        device=device,
        max_completion_length=load.completion[1],
    )


def predicted_bytes(shape: LearnerShape, load: Load, settings: TrainSettings) -> int:
    """Return the memory that `launch` and `plan` say a shape needs."""
    batch = LargestBatch(load.groups, load.samples, load.prompt)
    estimate = Estimate(Simulations(configuration(shape)), settings, batch)
    return estimate.footprint(1, device=settings.device).peak_bytes


def fitting(shape: LearnerShape, load: Load, free_bytes: int) -> tuple[TrainSettings, int] | None:
    """Return the first settings that fit into a card, and what they should take; None if none fits."""
    for moments in MOMENTS:
        settings = settings_of(load, "cuda", moments)
        if (needed := predicted_bytes(shape, load, settings)) <= free_bytes:
            return settings, needed
    return None


def measure(
    bench: Bench,
    name: str,
    shape: LearnerShape,
    load: Load,
    settings: TrainSettings,
    *,
    peak: float | None,
    rounds: int,
) -> None:
    """A shape's steps; the first one, which makes the optimizer's state, is not counted."""
    device = settings.device
    with tempfile.TemporaryDirectory() as scratch:
        write(shape, Path(scratch), device)
        policy = TrainedPolicy(Path(scratch), settings)
    for number in range(rounds + 1):
        groups = load.batch(shape.vocabulary, number)
        lengths = [[len(sample.tokens) // 4 for sample in group.samples] for group in groups]
        seconds = _timed(partial(policy.train_step, groups), device)
        if number:
            tokens = sum(map(sum, lengths))
            flops = sum(shape.step_flops(load.prompt, own) for own in lengths) / seconds
            bench.measure(f"{name}: completion tokens", tokens / seconds, unit="per s")
            bench.measure(f"{name}: arithmetic", flops / TERA, unit="TFLOP/s")
            bench.measure(f"{name}: matrix product", product_flops(device) / TERA, unit="TFLOP/s")
            if peak:
                bench.measure(f"{name}: MFU", 100 * flops / TERA / peak, unit="%")
    bench.ratio(f"{name}: of a matrix product", f"{name}: arithmetic", f"{name}: matrix product")


def product_flops(device: str) -> float:
    """Return the FLOPS of a large product of two bf16 matrices."""
    extent = EXTENT if device == "cuda" else EXTENT // 16
    left, right = (torch.randn(extent, extent, device=device, dtype=torch.bfloat16) for _ in range(2))
    left @ right
    times = 10
    seconds = _timed(lambda: [left @ right for _ in range(times)], device)
    return 2 * times * extent**3 / seconds


def _timed(step: Callable[[], object], device: str) -> float:
    """Seconds until the device has done it."""
    _wait(device)
    began = time.perf_counter()
    step()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
