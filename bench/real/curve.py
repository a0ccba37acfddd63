"""Reward by update: our learner on groups that are S updates old, beside TRL alone on the same problems.

- Both train all weights in float32 at the same rate with the same seed, on the problems of `examples/sums.py` in the
  same order: six groups of eight an update. GRPO with the mean of each sample's mean, clipped at 0.2 and 0.28.
- Ours samples, rewards, trains and publishes as a round does, in one process (`bench.learning.trial`): every batch is
  exactly S updates old. TRL is `GRPOTrainer.train` with its own `generate`.
- Judged is the mean reward of held-out problems, before and after, drawn by our engine for both.
- `--adapters` trains adapters, which our engine merges into the base, and leaves TRL out.
"""

import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from bench.harness import ROOT, Bench
from bench.learner import TRL_PYTHON, grpo_config
from bench.learning.trial import Trial
from coordinator.config import Config, load

EXAMPLE, TASK = ROOT / "examples" / "sums.toml", ROOT / "examples" / "sums.py"
RATE, ADAPTERS_RATE, ADAPTERS_RANK = 1e-5, 1e-4, 32
STALENESS = (0, 1, 2, 3, 4)
KEPT = 0.95
"""Least share of the gain with fresh groups that groups of S updates ago must reach."""

TRL = "curve, TRL"

HELD_OUT, ANSWERS = 24, 32
"""Problems, and samples of each."""


@dataclass(frozen=True)
class Job:
    """Training that TRL is asked for."""

    model: str
    rows: list[dict[str, Any]]
    """Prompts in our order, with their answers."""
    updates: int
    samples: int
    groups: int
    tokens: int
    temperature: float
    seed: int
    saved: str


def settings(folder: Path, model: Path, staleness: int, updates: int, *, adapters: bool = False) -> Config:
    """The example's round with all weights in training, or adapters."""
    changed = {
        "round.directory": folder,
        "round.max_updates": updates,
        "model.path": model,
        "task.name": TASK,
        "staleness.max_updates": staleness,
        "staleness.publish_every": 1,
        "learner.lora_rank": ADAPTERS_RANK if adapters else 0,
        "learner.learning_rate": ADAPTERS_RATE if adapters else RATE,
        "learner.warmup_updates": 1,
    }
    return load(EXAMPLE, [f"{name}={value}" for name, value in changed.items()])


def measure(
    bench: Bench, model: Path, scratch: Path, staleness: Sequence[int], updates: int, *, adapters: bool
) -> None:
    """Every arm, and the judgement."""
    problems, arms = list[str](), list[str]()
    for old in staleness:
        arms.append(f"curve, S = {old}")
        config = settings(scratch / f"{old}", model, old, updates, adapters=adapters)
        answers = _train_ours(bench, config, arms[-1], old)
        problems = problems or answers
    if not adapters:
        _train_trl(bench, model, scratch, problems, updates)
        arms.append(TRL)
    gain = {name: bench.median(f"{name}: after") - bench.median(f"{name}: before") for name in arms}
    fresh = gain.pop(f"curve, S = {min(staleness)}")
    for name, gained in gain.items():
        bench.measure(f"{name}: gain ÷ that of S = {min(staleness)}", gained / fresh, unit="×")
        if name != TRL:
            bench.goal(f"{name}: at least {KEPT:.0%} of the gain", gained / fresh, at_least=KEPT)


def _train_ours(bench: Bench, config: Config, name: str, staleness: int) -> list[str]:
    """Train an arm of ours; return the answers of its problems in order."""
    trial, answers = Trial(config, delay=staleness), list[str]()
    trial.publish()
    bench.measure(f"{name}: before", _held_out(trial), unit="reward")
    for _ in range(config.round.max_updates):
        groups = trial.generate()
        answers += [trial.answer(group) for group in groups]
        reward = fmean(sample.reward for group in groups for sample in group.samples)
        trial.train(groups)
        bench.measure(f"{name}: reward by update", reward, unit="reward")
        print(f"{name}, update {trial.update}: reward {reward:.3f}", flush=True)
    bench.measure(f"{name}: after", _held_out(trial), unit="reward")
    return answers


def _held_out(trial: Trial) -> float:
    return fmean(reward.score for reward in trial.held_out(HELD_OUT, ANSWERS))


def _train_trl(bench: Bench, model: Path, scratch: Path, answers: list[str], updates: int) -> None:
    """TRL's arm, in its own environment."""
    config = settings(scratch / "trl", model, 0, updates)
    rows = {row["answer"]: row for row in runpy.run_path(str(TASK))["problems"]("train", 0)}
    job = Job(
        model=str(model),
        rows=[rows[answer] for answer in answers],
        updates=updates,
        samples=config.sampling.samples_per_group,
        groups=config.learner.groups_per_update,
        tokens=config.sampling.max_new_tokens,
        temperature=config.sampling.temperature,
        seed=config.round.seed,
        saved=str(scratch / "trl-after"),
    )
    (scratch / "job.json").write_text(json.dumps(asdict(job)))
    command = [str(TRL_PYTHON), "-P", "-m", "bench.real.curve", str(scratch / "job.json")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    for reward in json.loads(said.splitlines()[-1]):
        bench.measure(f"{TRL}: reward by update", reward, unit="reward")
    for when, folder in (("before", model), ("after", Path(job.saved))):
        trial = Trial(settings(scratch / f"trl-{when}-round", folder, 0, updates), delay=0)
        bench.measure(f"{TRL}: {when}", _held_out(trial), unit="reward")


def train_with_trl(job: Job) -> list[float]:
    """Train, save, and return the mean reward of each update's completions."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    judge, curve = runpy.run_path(str(TASK))["reward"], list[float]()

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        scores = [
            judge(SimpleNamespace(answer=right), said[0]["content"])
            for said, right in zip(completions, answer, strict=True)
        ]
        curve.append(fmean(scores))
        return scores

    tokenizer = AutoTokenizer.from_pretrained(job.model)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32),
        reward_funcs=reward,
        args=grpo_config(
            output_dir=tempfile.mkdtemp(),
            gradient_checkpointing=False,
            per_device_train_batch_size=job.groups * job.samples,
            num_generations=job.samples,
            max_completion_length=job.tokens,
            max_steps=job.updates,
            temperature=job.temperature,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            loss_type="grpo",
            shuffle_dataset=False,
            seed=job.seed,
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(job.rows),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.model.to(torch.bfloat16).save_pretrained(job.saved)
    tokenizer.save_pretrained(job.saved)
    return curve


if __name__ == "__main__":
    print(json.dumps(train_with_trl(Job(**json.loads(Path(sys.argv[1]).read_text())))))
