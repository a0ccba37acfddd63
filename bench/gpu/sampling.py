"""Tokens per second that the torch engine samples at the shape of a real model, against `generate` of transformers.

- The same work for both: groups of samples with prompts of one length and completions of mixed lengths, none of which
  an end token cuts short; bf16, random weights. `generate` samples all in one batch, which ends with its longest row,
  and is not asked for log-probabilities. Only tokens that were asked for count.
- The limit is the time in which a step's weights can be read from the device's memory once; how fast that is, a large
  copy shows in the same run.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.gpu.shapes import LearnerShape, write
from bench.harness import Bench
from bench.real.samplers import Asked, endless, with_engine
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.settings import TrainSettings
from swarm_node.engine.torch.engine import TorchEngine

COPIED_BYTES = 2**31


@dataclass(frozen=True)
class Demand:
    """Groups of samples; the completions' lengths go up in equal steps to the longest."""

    groups: int = 16
    samples: int = 8
    prompt: int = 256
    longest: int = 256

    def asked(self) -> list[Asked]:
        lengths = [self.longest * (number % 8 + 1) // 8 for number in range(self.groups)]
        return [Asked([20 + number] * self.prompt, self.samples, length) for number, length in enumerate(lengths)]


def publish(shape: LearnerShape, folder: Path, device: str) -> Path:
    """Write a version with random weights and its canary, whose end token is never drawn."""
    write(shape, folder / "start", device)
    TrainedPolicy(folder / "start", TrainSettings(learning_rate=1e-6, device=device)).writer.save_hub(folder / "whole")
    return endless(folder / "whole", folder / "endless")


def generate(model: Any, asked: list[Asked]) -> None:
    """Sample all groups in one batch with transformers."""
    rows = [one.prompt for one in asked for _ in range(one.samples)]
    prompts = torch.tensor(rows, device=model.device)
    with torch.inference_mode():
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=max(one.tokens for one in asked),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            eos_token_id=None,
            pad_token_id=0,
        )


def bytes_per_s(device: str) -> float:
    """Return how fast the device reads and writes its memory in a large copy."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        target.copy_(source)
    torch.cuda.synchronize()
    return 10 * 2 * COPIED_BYTES / (time.perf_counter() - began)


def measure(bench: Bench, name: str, shape: LearnerShape, demand: Demand, *, device: str, rounds: int) -> None:
    """Measure both in turns; one round that warms up is not counted."""
    asked = demand.asked()
    wanted = sum(one.samples * one.tokens for one in asked)
    with tempfile.TemporaryDirectory() as scratch:
        folder = publish(shape, Path(scratch), device)
        ours = with_engine(TorchEngine(device=device, dtype="bfloat16"), folder)
        rival: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
    rival.generation_config.eos_token_id = None
    rival = rival.to(device)
    short = [one._replace(tokens=4) for one in asked]
    ours(short)
    generate(rival, short)
    steps = max(one.tokens for one in asked)
    for _ in range(rounds):
        began = time.perf_counter()
        if ours(asked) != wanted:
            raise RuntimeError("the engine drew another number of tokens than it was asked for")
        seconds = time.perf_counter() - began
        bench.measure(f"{name}: torch engine, bf16", wanted / seconds, unit="tokens per s")
        bench.measure(f"{name}: a step of {demand.groups * demand.samples} rows", 1000 * seconds / steps, unit="ms")
        began = time.perf_counter()
        generate(rival, asked)
        bench.measure(f"{name}: generate, bf16", wanted / (time.perf_counter() - began), unit="tokens per s")
    bench.ratio(f"{name}: torch engine / generate", f"{name}: torch engine, bf16", f"{name}: generate, bf16")
    if device == "cuda":
        speed = bytes_per_s(device)
        bench.measure(f"{name}: memory", speed / 1e9, unit="GB/s")
        bench.measure(f"{name}: reading the weights once", 1000 * 2 * shape.parameters / speed, unit="ms")
