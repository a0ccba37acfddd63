"""Distances of a trained model from its samples, and how many of them each bound of the correction drops.

- SmolLM2-135M-Instruct with all weights in training at 1e-5, every batch exactly S updates old; sampled by the torch
  engine, on the trial of `bench.learning`: no network, no clock.
- Nothing is dropped in the training itself. Before each update the whole batch is scored, and every bound is judged by
  the same samples: the geometric mean of π_old/μ over a sample's tokens, and the veto on single tokens.
- Counted are the batches that are S updates old and not those before.

`make bench-correction` takes a few minutes of one processor; QUICK=1 makes fewer updates.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from bench.harness import Bench, quick_from_environment
from bench.learning.trial import Trial
from coordinator.config import Config, load
from coordinator.learner.algorithm import Correction
from coordinator.learner.objective import kept
from coordinator.model.batch import collate

FOLDER = Path(os.environ.get("SWARM_SMOLLM2", Path(__file__).parents[1] / ".venv-real" / "smollm2"))

BOUNDS = ((0.9, 1.1), (0.8, 1.25), (0.7, 1.4), (0.5, 2.0))

TASK = '''
"""Sums in words, for a model that can speak: a right number earns most, a short answer a little."""

import random


def problems(split, seed):
    chance = random.Random(f"{split} {seed}")
    for _ in range(500):
        a, b = chance.randrange(2, 20), chance.randrange(2, 20)
        yield {"prompt": f"What is {a} + {b}? Answer with the number.", "answer": str(a + b)}


def reward(completions, answer, **columns):
    said = [messages[0]["content"] for messages in completions]
    return [float(right in text) - len(text) / 200 for text, right in zip(said, answer)]
'''


def settings(folder: Path, staleness: int, updates: int) -> Config:
    """A round of a few short groups that drops no sample."""
    (folder / "task.py").write_text(TASK)
    return load(
        None,
        [
            f"round.directory={folder / 'round'}",
            f"round.max_updates={updates}",
            f"model.path={FOLDER}",
            f"task.name={folder / 'task.py'}",
            "data.chat=true",
            "sampling.samples_per_group=6",
            "sampling.max_new_tokens=24",
            f"staleness.max_updates={staleness}",
            "staleness.publish_every=1",
            "learner.groups_per_update=4",
            "learner.learning_rate=1e-5",
            "learner.warmup_updates=2",
            "correction.sequence_low=0",
            "correction.sequence_high=1e9",
            "correction.veto=0",
        ],
    )


def measure(bench: Bench, staleness: int, updates: int) -> None:
    """Measure one training."""
    with tempfile.TemporaryDirectory() as scratch:
        trial = Trial(settings(Path(scratch), staleness, updates), delay=staleness)
        trial.publish()
        for _ in range(updates):
            groups = trial.generate()
            data = collate(groups)
            old = trial.crew.policy.logprobs(data)
            if trial.update >= max(1, staleness):
                judge(bench, staleness, (old - data.behaviour) * data.mask, data.mask)
            step = trial.train(groups)
            print(
                f"S={staleness} update={trial.update} reward={step.metrics['reward/mean']:.2f} "
                f"k3={step.metrics['kl/k3']:.4f} ess={step.metrics['is/ess']:.3f}",
                flush=True,
            )


def judge(bench: Bench, staleness: int, distance: torch.Tensor, mask: torch.Tensor) -> None:
    """Record the share of a batch's samples that each rule drops, in %."""
    rules = {f"[{low}, {high}]": Correction(sequence_low=low, sequence_high=high, veto=0.0) for low, high in BOUNDS}
    rules["veto 1e-4"] = Correction(sequence_low=0.0, sequence_high=1e9, veto=1e-4)
    for name, rule in rules.items():
        dropped = 1.0 - float(kept(distance, mask, rule).mean())
        bench.measure(f"S={staleness}, {name}", 100 * dropped, unit="% dropped")
    mean = (distance.sum(1) / mask.sum(1)).abs()
    bench.measure(f"S={staleness}, |mean d|, 95 % of samples below", float(mean.quantile(0.95)), unit="nats")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", type=int, nargs="+", default=[4])
    parser.add_argument("--updates", type=int, default=8 if quick_from_environment() else 16)
    asked = parser.parse_args()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
    bench = Bench("correction", inputs={"updates": asked.updates, "staleness": asked.staleness})
    default = Correction()
    for staleness in asked.staleness:
        measure(bench, staleness, asked.updates)
        case = f"S={staleness}, [{default.sequence_low}, {default.sequence_high}]"
        bench.goal(f"{case}, the default, drops at most 10 %", bench.median(case), at_most=10.0)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
