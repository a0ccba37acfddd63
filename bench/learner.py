"""An update of the learner against TRL's GRPOTrainer: same model, same token ids, same advantages, same loss.

- TRL's step is its own `compute_loss` on a batch of token ids, with its defaults and DAPO's token mean, `backward`, the
  clipping of the gradient and AdamW: what `trainer.train` does when the rollouts are there already. Ours is
  `TrainedPolicy.train_step`, which also decodes the batch and judges each claim.
- Each side runs in a process of its own, on one thread, and takes turns with the other. It tells the highest memory of
  the whole process, and by how much its steps raised that above what it took to load and import everything.
- The two must agree on the length of the gradient, or the run counts for nothing.

`make bench-learner` puts TRL into an environment of its own first.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import Bench, Child, quick_from_environment, serve

TRL_PYTHON = Path(os.environ.get("TRL_PYTHON", Path(__file__).parents[1] / ".venv-trl" / "bin" / "python"))

LEARNING_RATE = 1e-6


@dataclass(frozen=True)
class Way:
    """Settings by which both sides compute an update."""

    longest: int
    """Tokens of a completion."""
    prompt: int = 0
    """Tokens of the longest prompt; only `at_once` needs it."""
    threads: int = 1
    recompute: bool = False
    """Gradient checkpointing."""
    at_once: int = 0
    """Samples computed at once; 0: all. Ours may compute as many tokens at once as TRL's rows of so many samples have
    places."""


@dataclass(frozen=True)
class Case:
    """A model and a batch."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    prompts: int
    samples: int
    prompt_tokens: tuple[int, int]
    completion_tokens: tuple[int, int]


CASES = (
    Case("3.4 M, prompts and completions as they come", 256, 4, 4, 2, 768, 1024, 8, 8, (40, 120), (8, 64)),
    Case("3.4 M, short prompts, all completions of 64", 256, 4, 4, 2, 768, 1024, 8, 8, (12, 12), (64, 64)),
    Case("11.3 M, a vocabulary of 32,000", 256, 4, 4, 2, 768, 32000, 4, 8, (40, 120), (8, 64)),
)


def make_batch(case: Case, seed: int) -> dict[str, Any]:
    """Token ids, and the log-probabilities of a sampler that differs a little from the policy."""
    random = np.random.default_rng(seed)

    def tokens(bounds: tuple[int, int]) -> list[int]:
        return list(map(int, random.integers(3, case.vocabulary, random.integers(bounds[0], bounds[1] + 1))))

    return {
        "prompts": [tokens(case.prompt_tokens) for _ in range(case.prompts)],
        "completions": [[tokens(case.completion_tokens) for _ in range(case.samples)] for _ in range(case.prompts)],
        "rewards": [[float(number % 2) for number in range(case.samples)] for _ in range(case.prompts)],
    }


def make_model(case: Case, folder: Path) -> None:
    """Random weights in hub format."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from coordinator.learner.embedded import make_tokenizer

    config = Qwen3Config(
        vocab_size=case.vocabulary,
        hidden_size=case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        head_dim=case.hidden // case.heads,
        intermediate_size=case.intermediate,
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=0,
        dtype=torch.float32,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


class Ours:
    """`TrainedPolicy.train_step`."""

    def __init__(self, folder: Path, way: Way) -> None:
        from coordinator.learner.algorithm import Algorithm, Correction
        from coordinator.learner.policy import TrainedPolicy
        from coordinator.learner.ranks import Ranks
        from coordinator.learner.settings import TrainSettings

        # TRL without an inference engine takes samples for fresh.
        fresh = Algorithm(loss_aggregation="token", correction=Correction(mode="none"))
        settings = TrainSettings(
            LEARNING_RATE,
            warmup_updates=1,
            max_completion_length=way.longest,
            gradient_checkpointing=way.recompute,
            micro_batch_tokens=way.at_once * (way.prompt + way.longest),
            algorithm=fresh,
        )
        self._ranks = Ranks()
        self._policy = TrainedPolicy(folder, settings, self._ranks)

    @property
    def first(self) -> bool:
        """Return True if this process reports: of several ranks, only the first does."""
        return self._ranks.first

    def step(self, batch: dict[str, Any]) -> tuple[float, float]:
        from protocol.work.learning import TrainingGroup, TrainingSample
        from protocol.work.rollout import pack_logprobs, pack_tokens

        groups = [
            TrainingGroup(
                claim_id=f"{number:064x}",
                prompt=pack_tokens(prompt),
                policy_update=0,
                samples=tuple(
                    TrainingSample(
                        tokens=pack_tokens(tokens), logprobs=pack_logprobs([-5.0] * len(tokens)), reward=reward
                    )
                    for tokens, reward in zip(completions, rewards, strict=True)
                ),
            )
            for number, (prompt, completions, rewards) in enumerate(
                zip(batch["prompts"], batch["completions"], batch["rewards"], strict=True)
            )
        ]
        metrics = self._policy.train_step(groups).metrics
        return metrics["loss"], metrics["learner/grad_norm"]


@dataclass(frozen=True)
class TrainingShape:
    """The size of a training by TRL: samples of each group, groups of an update, tokens of a sample, and updates."""

    groups: int
    samples: int
    tokens: int
    updates: int
    rate: float


def grpo_training(shape: TrainingShape, **options: Any) -> Any:
    """TRL's settings for a whole training of a shape, by DAPO's token mean, which saves and shows nothing."""
    return grpo_config(
        output_dir=tempfile.mkdtemp(),
        gradient_checkpointing=False,
        per_device_train_batch_size=shape.groups * shape.samples,
        num_generations=shape.samples,
        max_completion_length=shape.tokens,
        max_steps=shape.updates,
        learning_rate=shape.rate,
        loss_type="dapo",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **options,
    )


def grpo_config(**options: Any) -> Any:
    """TRL's settings on a CPU in float32, without a board, a reference policy or a pinned loader."""
    from trl import GRPOConfig

    fixed = {"use_cpu": True, "bf16": False, "beta": 0.0, "epsilon_high": 0.28, "report_to": []}
    return GRPOConfig(**{**fixed, "dataloader_pin_memory": False, **options})


class Trl:
    """TRL's GRPOTrainer, its loss on a batch that is there already."""

    def __init__(self, folder: Path, way: Way) -> None:
        import torch
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import GRPOTrainer

        arguments = grpo_config(
            output_dir=tempfile.mkdtemp(),
            gradient_checkpointing=way.recompute,
            per_device_train_batch_size=8,
            num_generations=8,
            max_completion_length=way.longest,
            learning_rate=LEARNING_RATE,
            loss_type="dapo",
        )
        self._torch, self._at_once = torch, way.at_once
        self.trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": "1+1="}] * 8),
            processing_class=AutoTokenizer.from_pretrained(folder),
        )
        if way.recompute:  # else `train` switches it on
            self.trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.trainer.create_optimizer()
        self.trainer.current_gradient_accumulation_steps = 1
        self.trainer.args.steps_per_generation = 1

    def step(self, batch: dict[str, Any]) -> tuple[float, float]:
        torch, trainer = self._torch, self.trainer
        model = trainer.model
        model.train()
        total = 0.0
        for inputs in self._micro_batches(self._inputs(batch)):
            loss = trainer.compute_loss(model, inputs)
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return total, float(norm)

    def _micro_batches(self, whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Rows as the trainer accumulates their gradients: each micro-batch knows the tokens of the whole batch."""
        rows = len(whole["completion_ids"])
        for first in range(0, rows, self._at_once or rows):
            last = first + (self._at_once or rows)
            yield {name: part if name == "num_items_in_batch" else part[first:last] for name, part in whole.items()}

    def _inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        torch = self._torch

        def padded(rows: list[list[int]], left: bool) -> tuple[Any, Any]:
            width = max(map(len, rows))
            tokens, mask = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(2))
            for place, row in enumerate(rows):
                where = slice(width - len(row), width) if left else slice(0, len(row))
                tokens[place, where], mask[place, where] = torch.tensor(row), 1
            return tokens, mask

        size = len(batch["completions"][0])
        prompts, prompt_mask = padded([prompt for prompt in batch["prompts"] for _ in range(size)], left=True)
        tokens, mask = padded([row for rows in batch["completions"] for row in rows], left=False)
        rewards = torch.tensor(batch["rewards"])
        centred = rewards - rewards.mean(1, keepdim=True)
        advantages = centred / rewards.std(1, correction=0, keepdim=True)
        return {
            "prompt_ids": prompts,
            "prompt_mask": prompt_mask,
            "completion_ids": tokens,
            "completion_mask": mask,
            "advantages": advantages.flatten(),
            "num_items_in_batch": mask.sum(),
        }


def work(side: str, folder: Path, way: Way) -> None:
    """A side's process: a batch goes in, the seconds, loss and gradient norm of a step come out."""
    import torch

    torch.set_num_threads(way.threads)
    trainer = Ours(folder, way) if side == "ours" else Trl(folder, way)

    def step(batch: dict[str, Any]) -> dict[str, float]:
        began, cpu_s = time.perf_counter(), time.process_time()
        loss, norm = trainer.step(batch)
        cpu_s = time.process_time() - cpu_s
        return {"seconds": time.perf_counter() - began, "cpu_s": cpu_s, "loss": loss, "norm": norm}

    serve(step)


def open_side(side: str, folder: Path, way: Way) -> Child:
    """Start a side's process."""
    python = str(TRL_PYTHON) if side == "trl" else sys.executable
    return Child([python, "-P", "-m", "bench.learner", "--serve", side, str(folder), json.dumps(asdict(way))])


def measure(bench: Bench, case: Case, folder: Path, rounds: int) -> None:
    """Measure a case, the sides taking turns."""
    make_model(case, folder)
    way = Way(longest=case.completion_tokens[1])
    with ExitStack() as stack:
        sides = {name: stack.enter_context(closing(open_side(name, folder, way))) for name in ("ours", "trl")}
        answers: dict[str, dict[str, float]] = {}
        for number in range(rounds + 1):
            batch = make_batch(case, number)
            answers = {name: side.ask(batch) for name, side in sides.items()}
            if number:  # the first step makes the optimizer's state
                for name, answer in answers.items():
                    bench.measure(f"{case.name}: {name}", 1000 * answer["cpu_s"], unit="CPU ms")
        for name, answer in answers.items():
            bench.measure(f"{case.name}: {name}, peak", answer["peak"], unit="MiB")
            bench.measure(f"{case.name}: {name}, steps", answer["peak"] - sides[name].ready["peak"], unit="MiB")
    gap = abs(answers["ours"]["norm"] / answers["trl"]["norm"] - 1)
    bench.goal(f"{case.name}: gradients agree", gap, at_most=1e-3)
    times = bench.ratio(f"{case.name}: TRL ÷ ours", f"{case.name}: trl", f"{case.name}: ours")
    bench.goal(f"{case.name}: at least 1.5 times as fast", times, at_least=1.5)
    bench.ratio(f"{case.name}: steps, ours ÷ TRL", f"{case.name}: ours, steps", f"{case.name}: trl, steps")
    memory = bench.ratio(f"{case.name}: peak, ours ÷ TRL", f"{case.name}: ours, peak", f"{case.name}: trl, peak")
    bench.goal(f"{case.name}: at most 0.8 of the memory", memory, at_most=0.8)


def main() -> int:
    """Measure every case, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", nargs=3, metavar=("SIDE", "FOLDER", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        side, folder, way = options.serve
        work(side, Path(folder), Way(**json.loads(way)))
        return 0
    quick = quick_from_environment()
    rounds = 3 if quick else 7
    bench = Bench("learner", inputs={"rounds": rounds, "threads": 1}, quick=quick)
    for case in CASES[:1] if quick else CASES:
        with tempfile.TemporaryDirectory() as place:
            measure(bench, case, Path(place), rounds)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
