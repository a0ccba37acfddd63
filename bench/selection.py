"""Gain from choosing prompts: the same problems again and again, with `[selection]` and without.

- The demo's sums, from a file: the same ones come up again and again, as those of any data set do. A group of a problem
  that is always right, or always wrong, is paid for nothing.
- `even`: sums as they come. `skewed`: a quarter with a carry, which is what there is to learn; a quarter without
  one, which the policy knows; and half with answers that are longer than a completion may be.
- All begin with the demo's policy after its warm start, and are paid as many rollouts. Groups are fresh; the trial is
  that of `bench.learning`: the real learner, engine, rewards and selection, without a network.
- Judged by held-out sums, and by the share of groups whose samples differ: they alone teach.

`make bench-selection` is 18 trainings of a minute of one processor. Cells are kept as those of `bench.learning` are.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count, islice, product
from pathlib import Path
from statistics import fmean

import torch
from transformers.utils import logging as transformers_logging

from bench.harness import RESULTS, Bench, quick_from_environment
from bench.learning.cells import Cell, append, recorded
from bench.learning.subjects import BY_NAME, EXAMPLES
from bench.learning.training import start_of
from bench.learning.trial import Trial
from coordinator.config import Config, load
from protocol.tasks import Problem
from protocol.tasks.arithmetic import Arithmetic

UPDATES, EVERY = 100, 10

EVEN, SKEWED = 128, 256
"""Problems: each comes up six times, or three."""

RULES: dict[str, tuple[str, ...]] = {
    "all in their order": (),
    "filtered": ("selection.filter_after=1",),
    "the best half": ("selection.share=0.5",),
}
"""The lines of each rule in `[selection]`."""


def even(seed: int) -> list[Problem]:
    """Sums as they come."""
    return _different(seed, EVEN, lambda _: True)


def skewed(seed: int) -> list[Problem]:
    """Few that teach, among many that are known or out of reach."""
    carries = _different(seed, SKEWED // 4, _carries)
    known = _different(seed, SKEWED // 4, lambda problem: not _carries(problem))
    out_of_reach = [
        Problem(f"{4 * place + 5000}+{3 * place + 1000}=", str(7 * place + 6000)) for place in range(SKEWED // 2)
    ]
    return random.Random(seed).sample(chosen := [*carries, *known, *out_of_reach], len(chosen))


DATA: dict[str, Callable[[int], list[Problem]]] = {"even": even, "skewed": skewed}


def _different(seed: int, most: int, wanted: Callable[[Problem], bool]) -> list[Problem]:
    first = {
        problem.prompt: problem for problem in islice(filter(wanted, map(Arithmetic(seed).problem, count())), 2 * most)
    }
    return list(first.values())[:most]


def _carries(problem: Problem) -> bool:
    first, second = str(problem.prompt).rstrip("=").split("+")
    return int(first[-1]) + int(second[-1]) > 9


def write(path: Path, problems: Iterable[Problem]) -> Path:
    """Problems as somebody's file has them."""
    rows = (json.dumps({"prompt": problem.prompt, "answer": problem.answer}) + "\n" for problem in problems)
    path.write_text("".join(rows))
    return path


def settings(cell: Cell, folder: Path, start: Path) -> Config:
    """The round that a cell is."""
    train = write(folder / "train.jsonl", DATA[cell.task](cell.seed))
    held_out = write(folder / "held_out.jsonl", Arithmetic(cell.seed).problems("held_out"))
    changed = ["task.name=data", f"data.train={train}", f"data.eval={held_out}", f"model.path={start}"]
    changed += ["sampling.samples_per_group=16", "learner.groups_per_update=8"]
    changed += ["staleness.max_updates=0", "staleness.publish_every=1", f"round.max_updates={cell.updates}"]
    changed += [f"round.seed={cell.seed}", f"round.directory={folder / 'round'}"]
    return load(EXAMPLES / "demo.toml", [*changed, *RULES[cell.objective]])


def play(cell: Cell, start: Path) -> Cell:
    """Train; the curve is of held-out accuracy, and in the place of rewards stands each batch's share of signal."""
    began = time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        trial = Trial(settings(cell, Path(scratch), start), delay=0)
        trial.publish()
        curve, signal = [(0, 100 * trial.right(len(trial.task.problems("held_out"))))], list[float]()
        while trial.update < cell.updates:
            signal.append(trial.train(trial.generate()).metrics["reward/signal"])
            if trial.update % EVERY == 0 or trial.update == cell.updates:
                curve.append((trial.update, 100 * trial.right(len(trial.task.problems("held_out")))))
    return replace(cell, curve=tuple(curve), rewards=tuple(signal), cpu_s=time.process_time() - began)


def main() -> int:
    """Train what is missing, and tell all."""
    quick = quick_from_environment()
    parser = argparse.ArgumentParser(
        prog="bench selection", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", choices=tuple(DATA), default=tuple(DATA))
    parser.add_argument("--seeds", type=int, default=1 if quick else 3, help="how many")
    parser.add_argument("--updates", type=int, default=10 if quick else UPDATES, help="of each cell")
    parser.add_argument("--record", type=Path, default=RESULTS / "selection.jsonl", help="where cells are kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers annotates half
    inputs = {"data": options.data, "seeds": options.seeds, "updates": options.updates}
    bench = Bench("selection", inputs=inputs, quick=quick)
    for seed, data, rules in product(range(options.seeds), options.data, RULES):
        cell = Cell(data, 0, rules, seed, options.updates)
        if cell.name not in recorded(options.record):
            append(options.record, play(cell, start_of(BY_NAME["arithmetic"], seed, RESULTS / "starts")))
        done, name = recorded(options.record)[cell.name], f"{data}, {rules}"
        bench.measure(f"{name}: held out, before", done.before, unit="%")
        bench.measure(f"{name}: held out, gained", done.after - done.before, unit="points")
        bench.measure(f"{name}: groups that teach, of all", 100 * fmean(done.rewards), unit="%")
        bench.measure(f"{name}: groups that teach, lately", 100 * done.reward, unit="%")
        print(f"seed {seed}, {name}: {done.before:.1f} → {done.after:.1f} %, {done.reward:.2f} teach", flush=True)
    for data in options.data:
        judge(bench, data)
    return bench.finish()


def judge(bench: Bench, data: str) -> None:
    """Compare each way to choose with choosing none."""
    plain, *others = (f"{data}, {rules}" for rules in RULES)
    for name in others:
        case = "groups that teach, of all"
        more = bench.ratio(f"{name} ÷ {plain}: {case}", f"{name}: {case}", f"{plain}: {case}")
        bench.goal(f"{name}: more groups teach", more, at_least=1.1)
        gain = bench.median(f"{name}: held out, gained") - bench.median(f"{plain}: held out, gained")
        bench.goal(f"{name}: points gained beside {plain}", gain, at_least=0.0)


if __name__ == "__main__":
    raise SystemExit(main())
