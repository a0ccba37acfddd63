"""`make adversaries`: every attack as a row of two tables, and a training among hostile nodes.

- The first table has what a node can play alone, on a trained policy; the second what peers, origins and others play,
  as tests with real programs (`tests.adversaries.outsiders`).
- `--groups N` that each attacker is given; `--secrets N` lotteries in which those play who wait; `--updates N` of the
  training; `--only NAME …` plays some attacks of either table; `--skip-training` leaves the training out.
- `--keep FOLDER` keeps what was played: the same command goes on after it was killed, several at once share the work,
  and `--show` prints what there is.
- `QUICK=1` plays a few groups on a tiny policy that nobody trained, and leaves out the training and those who wait; the
  second table is the same.
- The exit status is 0 if everything that was asked for was played, nobody gained, no honest node had a hard fault, the
  second table was withstood, and the training reached its goal.
"""

import argparse
import fcntl
import json
import logging
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import torch
from transformers.utils import logging as transformers_logging

from bench.harness import quick_from_environment
from coordinator.base.files import write_durably
from coordinator.config import AuditSection, Config, load
from coordinator.learner.embedded import make_policy
from protocol.work.lease import is_exact
from tests.adversaries import outsiders, patience, tournament, trials
from tests.adversaries.arena import CLASS, UPDATES_PER_VERSION, Stage
from tests.adversaries.campaign import Result
from tests.adversaries.catalogue import AT_ONCE, PATIENT
from tests.adversaries.training import HONEST, HOSTILE, Learned, learn, stage_of, started
from tests.tiny_policy import make_tiny_policy, with_canary

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"

RISE = 0.2
"""The accuracy on unseen sums that training must add: the goal of bench/recipe.py."""

NICENESS = 10
"""The niceness of the run: it takes hours, and nobody waits for it."""

PATIENT_OWNERS, PATIENT_GROUPS = 400, 2_000
"""Owners and groups of whom the rules alone say what patience earns."""

HEADING = """\
| attack | class | groups, cheats | noticed by | after cheats | banned | gain, groups | honest: groups, hard faults |
|---|---|---|---|---|---|---|---|"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Play, print, judge."""
    parser = argparse.ArgumentParser(prog="make adversaries", description=__doc__)
    quick = quick_from_environment()
    parser.add_argument("--groups", type=int, default=20 if quick else 200)
    parser.add_argument("--secrets", type=int, default=0 if quick else 5)
    parser.add_argument("--updates", type=int, default=120)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--skip-training", action="store_true")
    options = parser.parse_args(arguments)
    known = sorted(
        [attack.__name__ for attack in (*AT_ONCE, *PATIENT)] + [outsider.name for outsider in outsiders.OUTSIDERS]
    )
    if unknown := sorted(set(options.only).difference(known)):
        parser.error(f"no attack is called {', '.join(unknown)}; there are {', '.join(known)}")
    logging.disable(logging.WARNING)  # every ban and fault is in the table
    os.nice(NICENESS)
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers annotates half
    config = load(DEMO, [])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.keep or temporary).absolute()
        sound = play_nodes(folder, config, quick, options)
        sound &= play_outsiders(folder / "trials", options.only, options.show)
        sound &= bool(options.only) or show_patience()
        trained = options.skip_training or quick or train(folder / "training", config, options.updates, options.show)
    return 0 if sound and trained else 1


def play_nodes(folder: Path, config: Config, quick: bool, options: argparse.Namespace) -> bool:
    """Play the first table and print it, if anything of it was asked for; whether all is well."""
    if options.only and not any(attack.__name__ in options.only for attack in (*AT_ONCE, *PATIENT)):
        return True
    stage = staged(folder / "policies", config, quick)
    wanted = tournament.campaigns(stage, options.groups, options.secrets, options.only)
    if not options.show:
        tournament.play(folder / "rows", stage, wanted)
    return show(list(tournament.played(folder / "rows", wanted)), len(wanted))


def play_outsiders(folder: Path, only: Sequence[str], only_show: bool) -> bool:
    """Play the second table and print it, if anything of it was asked for; whether all was withstood."""
    wanted = outsiders.chosen(only)
    if not only_show:
        trials.play(folder, wanted)
    return not wanted or trials.show(list(trials.played(folder, wanted)), len(wanted))


def staged(folder: Path, config: Config, quick: bool) -> Stage:
    """The policies that are played with; made once, by whoever comes first."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return tiny(folder) if quick else rehearsed(folder, config)


def tiny(folder: Path) -> Stage:
    """Three policies that nobody trained, two of which are taken for neighbours."""
    first, second, other = (make_tiny_policy(folder / name, seed=seed) for seed, name in enumerate("abc", 1))
    return Stage((first, second), other, samples=4, max_new_tokens=4, groups_per_update=8)


def rehearsed(folder: Path, config: Config) -> Stage:
    """Two neighbouring versions of the demo's policy, and another policy of its form."""
    first, other, done = folder / "rehearsal", folder / "other", folder / "done"
    if not done.exists():
        first.mkdir(exist_ok=True)
        policy = started(first, config, seed=0)
        learn(first, policy, config, updates=UPDATES_PER_VERSION, hostile=0, say=say)
        make_policy(other, seed=9)
        with_canary(other)
        done.touch()
    return replace(
        stage_of(first / "0", config),
        policies=(first / "0", first / str(UPDATES_PER_VERSION)),
        other=other,
        tolerance=CLASS,
    )


def show(played: Sequence[tuple[tournament.Campaign, Result]], wanted: int) -> bool:
    """Print a row for each attack and class; whether so many were played, and all is well with them."""
    rows = defaultdict[tuple[str, str], list[Result]](list)
    for campaign, result in played:
        rows[result.attack, campaign.tolerance].append(result)
    print(HEADING)
    sound = 0 < len(played) == wanted
    if not sound:
        print(f"played: {len(played)} of {wanted}; nothing is said of the others")
    for (attack, tolerance), results in rows.items():
        sound &= row(attack, tolerance, results)
    return sound


def row(attack: str, tolerance: str, results: list[Result]) -> bool:
    """Print one; up to chance nobody may gain, and no honest node may have a hard fault."""
    noticed = [result.noticed_after for result in results if result.noticed_after is not None]
    gains = [result.gain_groups for result in results]
    error = stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
    faults = sum(result.honest_hard_faults for result in results)
    after = f"{min(noticed)}–{max(noticed)}" if len(noticed) > 1 else str(noticed[0]) if noticed else "–"
    gain = f"{mean(gains):+.1f}" + (f" ± {error:.1f}" if error else "")
    print(
        f"| {attack} | {'exact' if is_exact(tolerance) else tolerance.split('/')[1]} "
        f"| {sum(r.groups for r in results)}, {sum(r.cheats for r in results)} "
        f"| {', '.join(sorted({r.by for r in results if r.by})) or '–'} | {after} "
        f"| {sum(r.banned for r in results)} of {len(results)} | {gain} "
        f"| {sum(r.honest_groups for r in results)}, {faults} |",
        flush=True,
    )
    return mean(gains) <= 2 * error and faults == 0


def show_patience() -> bool:
    """Show the gain from patience by the rules alone, with enough owners that chance is small."""
    sound = True
    for name, plan in patience.PLANS.items():
        gain = patience.gain(plan, owners=PATIENT_OWNERS, groups=PATIENT_GROUPS, rules=AuditSection())
        print(f"by the rules alone: {name}: {gain.mean:+.1f} ± {gain.standard_error:.1f} payments", flush=True)
        sound &= gain.mean <= 2 * gain.standard_error
    return sound


def train(folder: Path, config: Config, updates: int, only_show: bool) -> bool:
    """Train with three hostile nodes of ten; whether it reached its goal."""
    done = folder / f"learned-{updates}.json"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        if not done.exists() and not only_show:
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists() and not only_show:
            learned = learn(folder, started(folder, config, seed=1), config, updates=updates, hostile=HOSTILE, say=say)
            write_durably(done, json.dumps(learned._asdict()).encode())
    if not done.exists():
        print("the training among hostile nodes is not done")
        return False
    learned = Learned(**json.loads(done.read_text()))
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
