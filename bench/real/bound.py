"""A staleness bound that adapts, beside S = 0 and S = 1, in whole rounds of SmolLM2 with all weights trained.

- Each arm is a round of its own, one after the other: `swarm-coordinator demo` with a learner and one node in float32,
  each on one thread, on the problems of `examples/sums.py`. Nothing is audited, so that two cores suffice.
- Of each update the coordinator keeps how long the learner waited for its batch, the tokens that were dropped, and S.
- Judged are the mean share of dropped tokens, the reward of held-out problems after the round, and the share of time in
  which the learner waited. Each is the median of several rounds of an arm, taken in turns: which version a sample comes
  from depends on time, so that the rewards of two rounds of one arm differ.
"""

import json
import shutil
import sqlite3
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from bench.harness import ROOT, Bench
from bench.learning.trial import Trial
from bench.real.curve import ANSWERS, EXAMPLE, HELD_OUT, RATE, TASK, settings
from coordinator.transactions.staleness_bound import EFFECTIVE, IN_FORCE, MASKED
from tests.processes.programs import script

FRESH, ONE, ADAPTIVE = "bound: S = 0", "bound: S = 1", "bound: adaptive"

ARMS: Mapping[str, Sequence[str]] = {
    FRESH: ("staleness.max_updates=0",),
    ONE: ("staleness.max_updates=1",),
    ADAPTIVE: ("staleness.max_updates=6", "staleness.min_updates=1", "staleness.adaptive=true"),
}

MASKED_MAX, REWARD_KEPT = 0.05, 0.95

WAITS = "the learner waits"

NODE = "--engine torch --dtype float32 --threads 1"

UNCOUNTED = 3
"""Updates whose time does not count: the node fetches the policy and its engine starts."""


class Update(NamedTuple):
    """An update as the coordinator keeps it."""

    idle_s: float
    busy_s: float
    metrics: Mapping[str, float]


def measure(bench: Bench, model: Path, scratch: Path, updates: int, rounds: int) -> None:
    """Run every arm `rounds` times, in turns, and judge."""
    for lap in range(rounds):
        for name, own in ARMS.items():
            folder = scratch / f"{lap}-{name.removeprefix('bound: ').replace(' ', '')}"
            made, policy = _round(model, folder, [f"round.max_updates={updates}", *own])
            _measure(bench, name, made)
            bench.measure(f"{name}: held-out after", _held_out(policy, scratch / f"{folder.name}-after"), unit="reward")
            shutil.rmtree(folder)
    bench.goal("bound: % of tokens dropped", bench.median(f"{ADAPTIVE}: dropped in all"), at_most=100 * MASKED_MAX)
    reward, idle = ({name: bench.median(f"{name}: {what}") for name in ARMS} for what in ("held-out after", WAITS))
    kept = REWARD_KEPT * reward[FRESH]
    bench.goal(f"bound: reward less {REWARD_KEPT:.0%} of that of S = 0", reward[ADAPTIVE] - kept, at_least=0.0)
    bench.goal("bound: waiting less that of S = 1", idle[ADAPTIVE] - idle[ONE], at_most=0.0)


def _measure(bench: Bench, name: str, made: Sequence[Update]) -> None:
    for update in made:
        bench.measure(f"{name}: dropped tokens", 100 * update.metrics[MASKED], unit="%")
        bench.measure(f"{name}: effective sample size", update.metrics[EFFECTIVE])
        bench.measure(f"{name}: reward by update", update.metrics["reward/mean"], unit="reward")
        if IN_FORCE in update.metrics:
            bench.measure(f"{name}: S in force", update.metrics[IN_FORCE], unit="updates")
    bench.measure(f"{name}: dropped in all", 100 * fmean(update.metrics[MASKED] for update in made), unit="%")
    waited, worked = (sum(values) for values in zip(*(update[:2] for update in made[UNCOUNTED:]), strict=True))
    bench.measure(f"{name}: {WAITS}", 100 * waited / (waited + worked), unit="% of the time")


def _round(model: Path, folder: Path, own: Sequence[str]) -> tuple[list[Update], Path]:
    """Play a round; return its updates, and the exported policy."""
    chosen = [
        f"model.path={model}",
        f"task.name={TASK}",
        "learner.lora_rank=0",
        f"learner.learning_rate={RATE}",
        "learner.warmup_updates=1",
        "learner.threads=1",
        "audit.first_groups=0",
        "audit.floor=0",
        "audit.trusted_floor=0",
        *own,
    ]
    sets = [word for setting in chosen for word in ("--set", setting)]
    demo = [script("swarm-coordinator"), "demo", str(EXAMPLE), "--directory", str(folder), "--node", NODE, *sets]
    subprocess.run(demo, check=True, cwd=ROOT)
    placed = [*sets, "--set", f"round.directory={folder / 'round'}"]
    export = [script("swarm-coordinator"), "export", str(EXAMPLE), str(folder / "policy"), *placed]
    subprocess.run(export, check=True, cwd=ROOT)
    with sqlite3.connect(f"file:{folder / 'round' / 'state.db'}?mode=ro", uri=True) as store:
        rows = store.execute("SELECT idle_s, busy_s, metrics FROM batches WHERE metrics IS NOT NULL ORDER BY batch")
        return [Update(idle_s, busy_s, json.loads(metrics)) for idle_s, busy_s, metrics in rows], folder / "policy"


def _held_out(policy: Path, folder: Path) -> float:
    trial = Trial(settings(folder, policy, 0, 1), delay=0)
    return fmean(reward.score for reward in trial.held_out(HELD_OUT, ANSWERS))
