"""An update by one process, and by two ranks: the cost of sharding the weights, and the gain of the second core.

- Both are `TrainedPolicy.train_step` on the same batches, one thread each; the ranks are started as a round starts them
  (`learner.processes = 2`), talk over gloo on this machine, and hold half of all weights each (FSDP2).
- By the clock, since two processes wait for each other; turn by turn, a median of each turn's steps.
- Both must come to the same gradient, or the run counts for nothing.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from bench.harness import Bench, quick_from_environment
from bench.learner import CASES, Case, Ours, Way, make_batch, make_model
from coordinator.learner.launch import launch

SIZES = (1, 2)

UNCOUNTED = 1
"""The first step makes the optimizer's state."""


def turn(case: Case, folder: Path, size: int, steps: int) -> tuple[float, float]:
    """Seconds of an update by so many ranks, and the length of the last gradient."""
    place, report = str(CASES.index(case)), folder / f"told-{size}.json"
    command = [sys.executable, "-P", "-m", "bench.ranks", "--rank", place, str(folder), str(steps), str(report)]
    if size == 1:
        subprocess.run(command, check=True)
    else:
        if code := launch(command, size, folder / "round" / "ranks"):
            raise RuntimeError(f"The ranks ended with {code}.")
    said = json.loads(report.read_text())
    return median(said["seconds"][UNCOUNTED:]), said["norm"]


def work(case: Case, folder: Path, steps: int, report: Path) -> None:
    """Run the steps of one rank."""
    import torch

    torch.set_num_threads(1)
    side, seconds, norm = Ours(folder, Way(longest=case.completion_tokens[1])), list[float](), 0.0
    for number in range(steps):
        batch = make_batch(case, number)
        began = time.monotonic()
        _, norm = side.step(batch)
        seconds.append(time.monotonic() - began)
    if side.first:
        report.write_text(json.dumps({"seconds": seconds, "norm": norm}))


def measure(bench: Bench, case: Case, folder: Path, *, rounds: int, steps: int) -> None:
    """Measure a case, turn by turn."""
    make_model(case, folder)
    for number in range(rounds):
        norms = []
        for size in SIZES:
            seconds, norm = turn(case, folder, size, steps)
            norms.append(norm)
            bench.measure(f"{case.name}: {size} of them", 1000 * seconds, unit="ms")
            print(f"{number + 1} of {rounds}: {case.name}, {size}: {1000 * seconds:.0f} ms", flush=True)
        bench.check(f"{case.name}: the same gradient", abs(norms[1] / norms[0] - 1) < 1e-4)
    bench.ratio(f"{case.name}: one ÷ two", f"{case.name}: 1 of them", f"{case.name}: 2 of them")


def main() -> int:
    """Each case."""
    parser = argparse.ArgumentParser(
        prog="bench ranks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rank", nargs=4, metavar=("CASE", "FOLDER", "STEPS", "TOLD"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        case, folder, steps, report = options.rank
        work(CASES[int(case)], Path(folder), int(steps), Path(report))
        return 0
    quick = quick_from_environment()
    rounds, steps = (1, 3) if quick else (3, 6)
    bench = Bench("ranks", inputs={"rounds": rounds, "steps": steps, "threads": 1}, quick=quick)
    for case in CASES[:1] if quick else CASES:
        with tempfile.TemporaryDirectory() as place:
            measure(bench, case, Path(place), rounds=rounds, steps=steps)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
