"""One policy, three ways to train it: our learner with a swarm, TRL with a swarm, and TRL alone.

- All begin with the same policy after its warm start and take the same sums in the same order, 8 groups of 16 samples
  an update, by the same objective: DAPO's token mean without a correction, AdamW at one constant rate. Nothing is
  stale: our learner runs with S = 0, and TRL's `rollout_func` publishes before it samples.
- The swarm is a coordinator and two nodes as real processes. Nobody audits: an audit changes no sample.
- A policy is judged by its expected reward: the mean probability with which it answers each held-out sum rightly. That
  is computed, not sampled, so only the training itself adds noise. Its size is what the seeds show: two means agree if
  they differ by no more than Student's bound at 95 % for as many runs.
- One batch of token ids goes through both trainers first: their losses and gradients must agree to 1e-5.
  `tests/trl/test_objective.py` has the same for every preset.

`make bench-trainers` puts TRL into an environment of its own first.
"""

import argparse
import json
import math
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from bench.harness import RESULTS, ROOT, Bench, quick_from_environment
from bench.learner import CASES, TRL_PYTHON, TrainingShape, Way, grpo_training, make_batch, make_model, open_side
from protocol.policy.codec import PolicyCodec
from protocol.tasks.arithmetic import Arithmetic
from tests.processes.programs import Swarm, said, until
from tests.processes.rounds import NO_AUDITS, Coordinator, Settings, join

GROUPS, SAMPLES, TOKENS, RATE = 8, 16, 4, 1e-4
"""The demo's rate, with a quarter of its samples."""

BETAS = (0.9, 0.95)
"""AdamW's decay rates: those of our learner."""

NODES = 2
BIN = 10
"""Updates whose mean reward is one point of the curve."""

BUDGET_MICROS = 10**9

TRAINING_S = 900.0
"""The longest training by our learner, on a machine with other work."""

STUDENT = {2: 4.30, 3: 2.78, 4: 2.45, 5: 2.31}
"""Student's two-sided bound at 95 % for two means, by the number of runs of each."""


@dataclass(frozen=True)
class TrainingRun:
    """Input of a way to train a policy."""

    start: Path
    target: Path
    """The folder for the trained policy."""
    seed: int
    updates: int
    url: str = ""
    """The round that samples; empty: the trainer itself does."""
    key: str = ""


def by_our_learner(training: TrainingRun) -> list[float]:
    """Train with a round's own learner; return the mean reward of each update."""
    settings: Settings = {
        "round": {"max_updates": training.updates, "seed": training.seed},
        "staleness": {"max_updates": 0, "publish_every": 1},
        "learner": {
            "learning_rate": RATE,
            "warmup_updates": 1,
            "betas": list(BETAS),
            "groups_per_update": GROUPS,
        },
        "objective": {"loss_aggregation": "token"},
        "correction": {"mode": "none"},
    }
    with round_of(training, settings) as (swarm, coordinator):
        until("the last update", lambda: coordinator.status()["finished"], within_s=TRAINING_S)
        lines = (coordinator.folder / "learner" / "metrics.jsonl").read_text().splitlines()
        said(swarm, "swarm-coordinator", "export", str(coordinator.config_file), str(training.target))
    return [float(json.loads(line)["reward/mean"]) for line in lines]


def by_trl_with_a_swarm(training: TrainingRun) -> list[float]:
    """Train with TRL's trainer, which a round samples for; return the mean reward of each update."""
    settings: Settings = {"learner": {"external": True}, "round": {"seed": training.seed}}
    with round_of(training, settings) as (swarm, coordinator):
        words = (str(coordinator.config_file), "trl", "--budget", str(BUDGET_MICROS), "--publishes")
        key = said(swarm, "swarm-coordinator", "api-keys", "create", *words).split()[1]
        return by_trl(replace(training, url=coordinator.url, key=key))


def by_trl(training: TrainingRun) -> list[float]:
    """Train with TRL's trainer, in an environment of its own; return the mean reward of each update."""
    command = [str(TRL_PYTHON), "-P", "-m", "bench.trainers", "--trl", json.dumps(asdict(training), default=str)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"TRL ended with {done.returncode}:\n{done.stderr[-2000:]}")
    rewards: list[float] = json.loads(done.stdout.splitlines()[-1])
    return rewards


WAYS: Mapping[str, Callable[[TrainingRun], list[float]]] = {
    "our learner": by_our_learner,
    "TRL with the swarm": by_trl_with_a_swarm,
    "TRL alone": by_trl,
}


@contextmanager
def round_of(training: TrainingRun, settings: Settings) -> Iterator[tuple[Swarm, Coordinator]]:
    """Run a round with its nodes, on the sizes that all ways share."""
    shared: Settings = {
        "model": {"path": str(training.start)},
        "sampling": {"max_new_tokens": TOKENS, "samples_per_group": SAMPLES},
        "leases": {"timeout_s": 20},
        "audit": NO_AUDITS,
    }
    with tempfile.TemporaryDirectory() as folder:
        swarm = Swarm(Path(folder) / "swarm")
        try:
            coordinator = Coordinator(swarm, {**shared, **settings}).start(learner=True)
            for number in range(NODES):
                join(swarm, f"node-{number}", coordinator.join_string, "--engine", "torch")
            coordinator.reaches("version", 1)
            yield swarm, coordinator
        finally:
            swarm.close()


def train_with_trl(training: TrainingRun) -> list[float]:
    """Train in this process, which has TRL; return the mean reward of each update."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    from echo_swarm import Swarm as Round
    from echo_swarm.trl import SwarmRollouts

    task, rewards = Arithmetic(training.seed), list[float]()
    problems = [task.problem(number) for number in range(GROUPS * training.updates)]
    by_prompt = {problem.prompt: problem for problem in problems}

    def right(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        scores = [task.reward(by_prompt[prompt], text).score for prompt, text in zip(prompts, completions, strict=True)]
        rewards.append(fmean(scores))
        return scores

    arguments = grpo_training(
        TrainingShape(GROUPS, SAMPLES, TOKENS, training.updates, RATE),
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        shuffle_dataset=False,
        seed=training.seed,
    )
    with ExitStack() as stack:
        swarm = stack.enter_context(Round(training.url, training.key)) if training.url else None
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(training.start, dtype=torch.float32),
            reward_funcs=right,
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": problem.prompt} for problem in problems]),
            processing_class=AutoTokenizer.from_pretrained(training.start),
            **({"rollout_func": SwarmRollouts(swarm)} if swarm else {}),
        )
        trainer.train()
        trainer.save_model(str(training.target))
    return rewards


def expected_reward(folder: Path) -> float:
    """Return the mean probability of the right answer to a held-out sum, in percent."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = PolicyCodec((folder / "tokenizer.json").read_text())
    end = model.config.eos_token_id
    rows = []
    for problem in Arithmetic().problems("held_out"):
        rows.append((tokenizer.encode(str(problem.prompt)), [*tokenizer.encode(problem.answer), end]))
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids, is_answer = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest)
    for row, (prompt, answer) in enumerate(rows):
        ids[row, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
        is_answer[row, len(prompt) : len(prompt) + len(answer)] = 1.0
    with torch.no_grad():
        logits = model(ids).logits[:, :-1]
    chosen = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return 100 * float((chosen * is_answer[:, 1:]).sum(1).exp().mean())


def noise(one: Sequence[float], other: Sequence[float]) -> float:
    """Return how far the means of two ways may differ by chance, at 95 %."""
    runs = len(one)
    return STUDENT[runs] * math.sqrt((variance(one) + variance(other)) / runs)


def compare_a_batch(bench: Bench) -> None:
    """Put one batch of token ids through both trainers."""
    case = CASES[0]
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        make_model(case, Path(place))
        way, batch = Way(longest=case.completion_tokens[1]), make_batch(case, 0)
        sides = [stack.enter_context(closing(open_side(side, Path(place), way))) for side in ("ours", "trl")]
        ours, theirs = (side.ask(batch) for side in sides)
    for name, what in (("loss", "losses"), ("norm", "lengths of the gradients")):
        bench.measure(f"{name} of a batch: ours", ours[name])
        bench.measure(f"{name} of a batch: TRL", theirs[name])
        bench.goal(f"{what} of a batch agree", abs(ours[name] / theirs[name] - 1), at_most=1e-5)


def main() -> int:
    """Train every seed in every way, and compare."""
    quick = quick_from_environment()
    parser = argparse.ArgumentParser(
        prog="bench trainers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2 if quick else 3, choices=sorted(STUDENT))
    parser.add_argument("--updates", type=int, default=BIN if quick else 4 * BIN, help="of each training")
    parser.add_argument("--trl", metavar="TRAINING", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trl:
        print(json.dumps(train_with_trl(TrainingRun(**json.loads(options.trl)))))
        return 0

    from bench.learning.subjects import BY_NAME
    from bench.learning.training import start_of

    start = start_of(BY_NAME["arithmetic"], 0, RESULTS / "starts")
    inputs = {"seeds": options.seeds, "updates": options.updates, "rate": RATE, "groups": GROUPS, "samples": SAMPLES}
    bench = Bench("trainers", inputs=inputs, quick=quick)
    compare_a_batch(bench)
    before = expected_reward(start)
    bench.measure("held-out reward, before", before, unit="%")
    after: dict[str, list[float]] = {way: [] for way in WAYS}
    for seed in range(1, options.seeds + 1):
        for way, train in WAYS.items():
            with tempfile.TemporaryDirectory() as scratch:
                target = Path(scratch) / "trained"
                rewards = train(TrainingRun(start, target, seed, options.updates))
                after[way].append(expected_reward(target))
            for first in range(0, len(rewards), BIN):
                name = f"{way}: reward of updates {first + 1} to {first + BIN}"
                bench.measure(name, 100 * fmean(rewards[first : first + BIN]), unit="%")
            bench.measure(f"{way}: held-out reward, after", after[way][-1], unit="%")
    judge(bench, before, after)
    return bench.finish()


def judge(bench: Bench, before: float, after: Mapping[str, Sequence[float]]) -> None:
    """Compare the ways by what each seed reached."""
    for way, reached in after.items():
        bench.goal(f"{way}: better than before, points", fmean(reached) - before, at_least=0.0 if bench.quick else 5.0)
    for one, other in combinations(after, 2):
        for ours, theirs in zip(after[one], after[other], strict=True):
            bench.measure(f"{one} − {other}", ours - theirs, unit="points")
        apart, bound = abs(fmean(after[one]) - fmean(after[other])), noise(after[one], after[other])
        bench.measure(f"{one}, {other}: noise", bound, unit="points")
        bench.goal(f"{one} and {other} differ by no more than noise, points", apart, at_most=bound)


if __name__ == "__main__":
    raise SystemExit(main())
