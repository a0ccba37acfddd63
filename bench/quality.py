"""What staleness costs in quality: the demo's task, trained on groups that are exactly S updates old.

- The worst that a bound S allows, all the time: a version is published with every update, and each batch comes from the
  one of S updates ago. A swarm's groups are younger on average.
- `plain` takes stale samples for fresh: GRPO without any correction. `corrected` is what the demo trains with: each
  token's weight π_old/μ, truncated, and samples that are too far off left out.
- Without a network and without a clock: one process samples and trains with the real parts, as bench/recipe.py does.
- Cells are appended to `bench/results/quality.jsonl` as they are done, and a run goes on where the last one stopped.
  All cells of a seed begin with the same warm start. `ARGS="--svg docs/img"` draws what is there.

`make bench-quality` is the whole table: about an hour of one processor.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch
from transformers.utils import logging as transformers_logging

from bench.harness import RESULTS, Bench, quick_from_environment
from bench.recipe import DEMO, Round
from coordinator import plot
from coordinator.config import Config, load

STALENESS = (0, 1, 3, 6, 11)

OBJECTIVES: dict[str, tuple[str, ...]] = {
    "plain": ("correction.mode=none",),
    "corrected": (),
}

RECORD = RESULTS / "quality.jsonl"

LATELY = 0.25
"""The last part of a run, over which its reward is averaged."""

NEAR_POINTS = 5.0
"""The paper: up to S = 6, within about so many percent of synchronous training."""


@dataclass(frozen=True)
class Cell:
    """One training: how old its groups were, by which objective, and what came of it."""

    staleness: int
    objective: str
    seed: int
    updates: int
    before: float = 0.0
    after: float = 0.0
    reward: float = 0.0
    """Mean over the last updates."""
    worst: float = 0.0
    """The least mean of a batch in the second half: what broke down on the way shows here."""

    @property
    def name(self) -> tuple[int, str, int, int]:
        return self.staleness, self.objective, self.seed, self.updates


def cells(seeds: Sequence[int], updates: int) -> Iterator[Cell]:
    """All of them, so ordered that what is there can be compared whenever the run is stopped."""
    for seed in seeds:
        for staleness in STALENESS:
            for objective in OBJECTIVES:
                yield Cell(staleness, objective, seed, updates)


def recorded(path: Path) -> dict[tuple[int, str, int, int], Cell]:
    """What earlier runs have done; half a line of one that was killed is nothing."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            cell = Cell(**json.loads(line))
        except (ValueError, TypeError):
            continue
        found[cell.name] = cell
    return found


def append(path: Path, cell: Cell) -> None:
    """A line more, on a line of its own whatever was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = path.exists() and not path.read_bytes().endswith(b"\n")
    with path.open("a") as record:
        record.write(("\n" if torn else "") + json.dumps(asdict(cell)) + "\n")


def settings(cell: Cell) -> Config:
    fixed = (
        f"staleness.max_updates={cell.staleness}",
        "staleness.publish_every=1",
        f"round.max_updates={cell.updates}",
    )
    return load(DEMO, [*fixed, *OBJECTIVES[cell.objective]])


def play(cell: Cell, start: Path, folder: Path) -> Cell:
    """Train one cell from its seed's warm start."""
    trial = Round(settings(cell), cell.seed, folder, delay=cell.staleness, start=start)
    trial.publish()
    before, rewards = trial.accuracy(), []
    for _ in range(cell.updates):
        groups = trial.generate()
        rewards.append(fmean(sample.reward for group in groups for sample in group.samples))
        trial.train(groups)
    lately = rewards[int((1 - LATELY) * len(rewards)) :]
    outcome = {
        "before": before,
        "after": trial.accuracy(),
        "reward": fmean(lately),
        "worst": min(rewards[len(rewards) // 2 :]),
    }
    return Cell(**asdict(cell) | outcome)


def warm(seed: int, folder: Path) -> Path:
    """The warm start of a seed."""
    config = settings(Cell(0, "plain", seed, 1))
    trial = Round(config, seed, folder)
    trial.warm_start()
    return trial.publish()


def run(wanted: Sequence[Cell], path: Path) -> list[Cell]:
    """All that is wanted, of which only what is missing is trained."""
    done = recorded(path)
    with tempfile.TemporaryDirectory() as scratch:
        starts: dict[int, Path] = {}
        for number, cell in enumerate(wanted):
            if cell.name in done:
                continue
            if cell.seed not in starts:
                starts[cell.seed] = warm(cell.seed, Path(scratch) / f"seed-{cell.seed}")
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                done[cell.name] = play(cell, starts[cell.seed], Path(folder))
            append(path, done[cell.name])
            here = done[cell.name]
            print(
                f"{number + 1} of {len(wanted)}: S = {here.staleness}, {here.objective}, seed {here.seed}: "
                f"{here.before:.1%} → {here.after:.1%}, reward {here.reward:.3f}",
                flush=True,
            )
    return [done[cell.name] for cell in wanted]


def mean_after(found: Sequence[Cell], objective: str, staleness: int) -> float:
    """In per cent, over the seeds."""
    return 100 * fmean(cell.after for cell in found if (cell.objective, cell.staleness) == (objective, staleness))


def judge(found: Sequence[Cell], bench: Bench) -> None:
    """The table, and what the paper claims of it."""
    for objective in OBJECTIVES:
        for staleness in STALENESS:
            for cell in found:
                if (cell.objective, cell.staleness) == (objective, staleness):
                    bench.measure(f"{objective}, S = {staleness}: right in the end", 100 * cell.after, unit="%")
    lost = mean_after(found, "corrected", 0) - min(mean_after(found, "corrected", s) for s in STALENESS if s <= 6)
    bench.goal("corrected, points lost up to S = 6", lost, at_most=NEAR_POINTS)


def draw(found: Sequence[Cell], folder: Path) -> None:
    """Accuracy against S, a line for each objective."""
    curves = {
        objective: [(float(staleness), mean_after(found, objective, staleness)) for staleness in STALENESS]
        for objective in OBJECTIVES
    }
    title = "Held-out accuracy in % at the end, against the age of all groups in updates (mean over seeds)"
    (folder / "quality.svg").write_text(plot.lines(title, curves, right=max(STALENESS), top=100))


def main() -> int:
    """Train what is missing, and judge all."""
    quick = quick_from_environment()
    parser = argparse.ArgumentParser(prog="bench quality", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1 if quick else 3, help="how many")
    parser.add_argument("--updates", type=int, default=10 if quick else 80, help="of each cell")
    parser.add_argument("--record", type=Path, default=RECORD, help="where cells are kept")
    parser.add_argument("--svg", type=Path, help="folder for the figure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers annotates half
    seeds = range(options.seeds)
    found = run(list(cells(seeds, options.updates)), options.record)
    bench = Bench("quality", inputs={"seeds": list(seeds), "updates": options.updates, "S": STALENESS}, quick=quick)
    judge(found, bench)
    if options.svg:
        draw(found, options.svg)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
