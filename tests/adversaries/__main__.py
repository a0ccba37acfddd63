"""`make adversaries`: every attack on a trained policy as a table, and a training among hostile nodes.

- `--groups N` that each attacker is given; `--secrets N` lotteries in which those play who wait; `--updates N` of the
  training; `--only NAME …` plays some attacks; `--skip-training` leaves the training out.
- `QUICK=1` plays a few groups on a tiny policy that nobody trained, and leaves out the training and those who wait.
- The exit status is 0 if nobody gained, no honest node had a hard fault, and the training reached its goal.
"""

import argparse
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch
from transformers.utils import logging as transformers_logging

from bench.harness import quick_from_environment
from coordinator.config import Config, load
from coordinator.learner.embedded import make_policy
from tests.adversaries.arena import SHIPPED_SETTINGS, UPDATES_PER_VERSION, Stage
from tests.adversaries.campaign import Result, fight
from tests.adversaries.catalogue import AT_ONCE, PATIENT
from tests.adversaries.nodes import Adversary
from tests.adversaries.training import HONEST, HOSTILE, learn, stage_of, started
from tests.tiny_policy import make_tiny_policy, with_canary

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"

RISE = 0.2
"""What training must add to the accuracy on unseen sums: the goal of bench/recipe.py."""

HEADING = """\
| attack | class | groups, cheats | noticed by | after cheats | banned | gain, groups | honest: groups, hard faults |
|---|---|---|---|---|---|---|---|"""


def main() -> int:
    """Play, print, judge."""
    parser = argparse.ArgumentParser(prog="make adversaries", description=__doc__)
    quick = quick_from_environment()
    parser.add_argument("--groups", type=int, default=20 if quick else 200)
    parser.add_argument("--secrets", type=int, default=0 if quick else 5)
    parser.add_argument("--updates", type=int, default=120)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--skip-training", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # every ban and fault is in the table
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers annotates half
    config = load(DEMO, [])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        stage = tiny(folder) if quick else rehearsed(folder, config)
        sound = [judged(result) for result in played(stage, options.only, options.groups, options.secrets)]
        trained = options.skip_training or quick or train(folder, config, options.updates)
    return 0 if all(sound) and trained else 1


def tiny(folder: Path) -> Stage:
    """Three policies that nobody trained, two of which are taken for neighbours."""
    first, second, other = (make_tiny_policy(folder / name, seed=seed) for seed, name in enumerate("abc", 1))
    return Stage((first, second), other, samples=4, max_new_tokens=4, groups_per_update=8)


def rehearsed(folder: Path, config: Config) -> Stage:
    """Two neighbouring versions of the demo's policy, and another policy of its form."""
    first = folder / "rehearsal"
    first.mkdir()
    policy = started(first, config, seed=0)
    learn(first, policy, config, updates=UPDATES_PER_VERSION, hostile=0, say=say)
    make_policy(folder / "other", seed=9)
    with_canary(folder / "other")
    stage = stage_of(first / "0", config)
    return replace(
        stage,
        policies=(first / "0", first / str(UPDATES_PER_VERSION)),
        other=folder / "other",
        tolerance=SHIPPED_SETTINGS.audit.tolerance,
    )


def played(stage: Stage, only: Sequence[str], groups: int, secrets: int) -> Iterator[tuple[str, list[Result]]]:
    """Each attack by the shipped tolerances; those that they are too loose for by the demo's, too."""
    print(HEADING)
    strict = replace(stage, tolerance="torch/fp32/cpu")
    for attack in (*AT_ONCE, *PATIENT):
        if (only and attack.__name__ not in only) or (attack in PATIENT and not secrets):
            continue
        results = campaigns(attack, stage, groups, secrets)
        yield stage.tolerance, results
        if any(result.gain_micros > 0 and result.noticed_after is None for result in results):
            yield strict.tolerance, campaigns(attack, strict, groups, secrets)


def campaigns(attack: type[Adversary], stage: Stage, groups: int, secrets: int) -> list[Result]:
    """One for an attack from the start; for one that waits, so many, each as long again as it waits."""
    if attack not in PATIENT:
        return [fight(attack, stage, groups)[-1]]
    return [fight(attack, stage, 2 * groups, secret=secret)[-1] for secret in range(secrets)]


def judged(played: tuple[str, list[Result]]) -> bool:
    """Print a row; whether all is well with it."""
    tolerance, results = played
    noticed = [result.noticed_after for result in results if result.noticed_after is not None]
    gain = mean(result.gain_groups for result in results)
    faults = sum(result.honest_hard_faults for result in results)
    after = f"{min(noticed)}–{max(noticed)}" if len(noticed) > 1 else str(noticed[0]) if noticed else "–"
    print(
        f"| {results[0].attack} | {tolerance.split('/')[1]} "
        f"| {sum(r.groups for r in results)}, {sum(r.cheats for r in results)} "
        f"| {', '.join(sorted({r.by for r in results if r.by})) or '–'} | {after} "
        f"| {sum(r.banned for r in results)} of {len(results)} | {gain:+.1f} "
        f"| {sum(r.honest_groups for r in results)}, {faults} |",
        flush=True,
    )
    return gain <= 0 and faults == 0


def train(folder: Path, config: Config, updates: int) -> bool:
    """Train with three hostile nodes of ten; whether it reached its goal."""
    place = folder / "training"
    place.mkdir()
    learned = learn(place, started(place, config, seed=1), config, updates=updates, hostile=HOSTILE, say=say)
    print(
        f"training with {HOSTILE} hostile nodes of {HONEST + HOSTILE}: {learned.before:.1%} → {learned.after:.1%} in "
        f"{learned.updates} updates; {learned.hostile_groups} forged groups of {learned.hostile_keys} keys were "
        f"trained on; hard faults of honest nodes: {learned.honest_hard_faults}",
        flush=True,
    )
    return learned.after - learned.before >= RISE and not learned.honest_hard_faults


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
