"""Learning in environments with tools, and in those of other libraries: held-out episodes solved, before and after.

- `tools`: a question whose answer only the right call of the right tool returns (`bench/learned_play/warehouse.py`).
- `verifiers`: a taskset with a user, a counting dialogue (`bench/learned_play/counting.py`).
- Real are the environment, the parser of calls, the chat template, the play of groups, the engine and the learner; the
  policy is a small one that imitated a careless player. Groups are fresh. Episodes are sampled, not greedy.
- Cells are kept as those of `bench.learning` are, in `bench/results/learned_play.jsonl`.

`make bench-learned-play` takes three minutes of one processor for each seed of each.
"""

import argparse
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from bench.harness import RESULTS, Bench, quick_from_environment
from bench.learned_play.subjects import available
from bench.learning.cells import Cell, append, recorded
from bench.learning.subjects import Subject
from bench.learning.training import play, start_of

QUICK_UPDATES = 2


def trained(subject: Subject, cell: Cell, record: Path) -> Cell:
    """Return the result of a cell, which is trained if it is not recorded."""
    if (known := recorded(record).get(cell.name)) is not None:
        return known
    done = play(subject, cell, start_of(subject, cell.seed, record.parent / "starts"))
    append(record, done)
    return done


def main() -> int:
    """Train what is missing, and judge all."""
    quick = quick_from_environment()
    subjects = {subject.name: subject for subject in available()}
    parser = argparse.ArgumentParser(
        prog="bench learned-play", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--subjects", nargs="+", choices=tuple(subjects), default=tuple(subjects))
    parser.add_argument("--seeds", type=int, default=1 if quick else 3, help="how many")
    parser.add_argument("--updates", type=int, default=QUICK_UPDATES if quick else None, help="of each training")
    parser.add_argument("--record", type=Path, default=RESULTS / "learned_play.jsonl", help="where cells are kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers annotates half
    bench = Bench("learned_play", inputs={"subjects": options.subjects, "seeds": options.seeds}, quick=quick)
    for name in options.subjects:
        subject, gains = subjects[name], list[float]()
        for seed in range(options.seeds):
            cell = trained(
                subject, Cell(name, 0, "corrected", seed, options.updates or subject.updates), options.record
            )
            for when, value in (("before", cell.before), ("after", cell.after)):
                bench.measure(f"{name}: {subject.figure}, {when}", value, unit=subject.unit)
            gains.append(subject.gain(cell.before, cell.after))
            curve = ", ".join(f"{value:.1f}" for _, value in cell.curve)
            print(f"{name}, seed {seed}: {curve} {subject.unit}, {cell.cpu_s:.0f} CPU s", flush=True)
        bench.goal(f"{name}: gain of the worst seed", min(gains), at_least=subject.gain_wanted)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
