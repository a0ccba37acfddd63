"""Learning curves of four tasks, and what the age of groups costs, by the corrected objective and by plain GRPO.

- `arithmetic`, `spell_backward` of reasoning-gym, Leduc poker (exact exploitability) and Sokoban, each with the real
  environment, sampler, rewards and learner, and the small policy that is made here.
- The worst that a bound S allows, all the time: a version is published with every update, and each batch comes from the
  one of S updates ago. A swarm's groups are younger on average.
- `plain` takes stale samples for fresh: GRPO without any correction. `corrected` is what the examples train with: each
  token's weight π_old/μ, truncated, and samples that are too far off left out.
- Cells are appended to `bench/results/learning.jsonl` as they are done, and a run goes on where the last one stopped.
  All cells of a seed begin with the same policy. `ARGS="--svg docs/img"` draws what is there.

`make bench-learning` is the whole table: an hour or two of one processor.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from bench.harness import RESULTS, Bench, quick_from_environment
from bench.learning.cells import Cell, append, ordered, recorded
from bench.learning.report import Found, draw, judge
from bench.learning.subjects import BY_NAME
from bench.learning.training import play, start_of

STALENESS = (0, 3, 6, 11)
QUICK_UPDATES = 10


def run(wanted: Sequence[Cell], record: Path, starts: Path) -> None:
    """Train what is missing, in this order."""
    for number, cell in enumerate(wanted):
        if cell.name in recorded(record):
            continue
        subject = BY_NAME[cell.task]
        done = play(subject, cell, start_of(subject, cell.seed, starts))
        append(record, done)
        print(
            f"{number + 1} of {len(wanted)}: {done.task}, {done.objective}, S = {done.staleness}, seed {done.seed}: "
            f"{done.before:.4g} → {done.after:.4g} {subject.unit}, reward {done.reward:.3f}, {done.cpu_s:.0f} CPU s",
            flush=True,
        )


def main() -> int:
    """Train what is missing, and judge all."""
    quick = quick_from_environment()
    parser = argparse.ArgumentParser(
        prog="bench learning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=tuple(BY_NAME), default=tuple(BY_NAME))
    parser.add_argument("--seeds", type=int, default=1 if quick else 3, help="how many")
    parser.add_argument("--staleness", nargs="+", type=int, default=(0, 3) if quick else STALENESS, metavar="S")
    parser.add_argument("--updates", type=int, default=QUICK_UPDATES if quick else None, help="of each cell")
    parser.add_argument("--record", type=Path, default=RESULTS / "learning.jsonl", help="where cells are kept")
    parser.add_argument("--report", action="store_true", help="train nothing: judge what is there")
    parser.add_argument("--svg", type=Path, help="folder for the plots")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers annotates half
    updates = {name: options.updates or BY_NAME[name].updates for name in options.tasks}
    wanted = list(ordered(updates, range(options.seeds), sorted(options.staleness)))
    if not options.report:
        run(wanted, options.record, options.record.parent / "starts")
    done = recorded(options.record)
    results = Found(done[cell.name] for cell in wanted if cell.name in done)
    bench = Bench(
        "learning",
        inputs={"tasks": options.tasks, "seeds": options.seeds, "S": options.staleness, "updates": [*updates.values()]},
        quick=quick,
    )
    judge(results, bench)
    if options.svg:
        draw(results, options.svg)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
