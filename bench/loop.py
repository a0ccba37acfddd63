"""Updates per second: the whole loop with three nodes on this machine, against TRL alone on the same cores.

- Ours is the demo: coordinator, learner, auditor, seeder and three nodes as real processes, with signatures, patches,
  audits and a ledger. TRL is `GRPOTrainer.train` with its own `generate`, one process that may use every core.
- Both begin with the same policy after its warm start, and take the same prompts, rewards, sizes and rate: 16 groups of
  32 samples an update.
- Counted are the updates after the first few, by the clock. The sides take turns, so that other work disturbs both.
- It says what everything around sampling and learning costs where nothing is gained by it: nodes share the cores of the
  learner, and three engines sample what one could.

`make bench-loop` puts TRL into an environment of its own first.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.harness import RESULTS, Bench, quick_from_environment
from bench.learner import TRL_PYTHON, TrainingShape, grpo_training

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "examples" / "demo.toml"

UNCOUNTED = 5
"""Updates before both run as they go on to: nodes fetch, engines start, the optimizer's state is made."""

GROUPS, SAMPLES, TOKENS, RATE = 16, 32, 4, 1e-4
"""The demo's sizes."""

NODES = 3


def ours(start: Path, updates: int) -> float:
    """Updates per second of the learner in a demo."""
    with tempfile.TemporaryDirectory() as scratch:
        settings = [f"model.path={start}", f"round.max_updates={updates}"]
        command = [Path(sys.executable).with_name("swarm-coordinator"), "demo", DEMO, "--nodes", str(NODES)]
        command += ["--directory", scratch, *(word for setting in settings for word in ("--set", setting))]
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
        lines = (Path(scratch) / "round" / "learner" / "metrics.jsonl").read_text().splitlines()
    return rate([json.loads(line)["seconds"] for line in lines])


def theirs(start: Path, updates: int) -> float:
    """Updates per second of TRL's trainer."""
    command = [str(TRL_PYTHON), "-P", "-m", "bench.loop", "--trl", str(start), str(updates)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    return rate(json.loads(said.splitlines()[-1]))


def rate(ended: Sequence[float]) -> float:
    """Updates per second, by when each of them ended."""
    counted = ended[UNCOUNTED:]
    if len(counted) < 2 or any(after <= before for before, after in pairwise(counted)):
        raise ValueError(f"No rate follows from updates that ended at {list(ended)}.")
    return (len(counted) - 1) / (counted[-1] - counted[0])


def train_with_trl(folder: Path, updates: int) -> list[float]:
    """Train with TRL; return the times at which its updates ended."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    from protocol.tasks.arithmetic import Arithmetic

    task, ended = Arithmetic(0), list[float]()
    problems = [task.problem(number) for number in range(GROUPS * updates)]

    def right(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [task.reward(by_prompt[asked], said).score for asked, said in zip(prompts, completions, strict=True)]

    by_prompt = {problem.prompt: problem for problem in problems}

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ended.append(time.monotonic())

    arguments = grpo_training(TrainingShape(GROUPS, SAMPLES, TOKENS, updates, RATE))
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=right,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": problem.prompt} for problem in problems]),
        processing_class=AutoTokenizer.from_pretrained(folder),
        callbacks=[Clock()],
    ).train()
    return ended


def main() -> int:
    """Run both sides in turns."""
    quick = quick_from_environment()
    parser = argparse.ArgumentParser(
        prog="bench loop", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1 if quick else 3)
    parser.add_argument("--updates", type=int, default=15 if quick else 60, help="of each run")
    parser.add_argument("--trl", nargs=2, metavar=("FOLDER", "UPDATES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trl:
        print(json.dumps(train_with_trl(Path(options.trl[0]), int(options.trl[1]))))
        return 0

    from bench.learning.subjects import BY_NAME
    from bench.learning.training import start_of

    start = start_of(BY_NAME["arithmetic"], 0, RESULTS / "starts")
    bench = Bench("loop", inputs={"rounds": options.rounds, "updates": options.updates, "nodes": NODES}, quick=quick)
    for number in range(options.rounds):
        for case, side in (("the whole loop, 3 nodes", ours), ("TRL alone", theirs)):
            rate = side(start, options.updates)
            bench.measure(case, rate, unit="updates/s")
            print(f"{number + 1} of {options.rounds}: {case}, {rate:.4g} updates/s", flush=True)
    times = bench.ratio("the whole loop ÷ TRL", "the whole loop, 3 nodes", "TRL alone")
    bench.goal("at least as many updates as TRL alone", times, at_least=1.0)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
