"""`make bench-paper`: Table 2, Figures 3c and 4 and the headline of ECHO-2, each beside the paper's own numbers.

- Nothing is timed here: the same code gives the same figures on any machine. bench/RESULTS.md tells what they mean.
- `--svg FOLDER` writes the two figures there.
"""

import argparse
import sys
from pathlib import Path

from bench.harness import Bench, quick_from_environment
from bench.paper import headline, knee, spread, table2
from bench.paper.setting import BROADCAST_S, MODEL_MB
from coordinator.sim import report
from coordinator.sim.scenario import Admission

NEAR = 0.02
WAIT_NEAR_S = 2.0
KNEE_NEAR = 0.05
SAVED_PUBLISHED = {"sync": 0.333, "async": 0.363}
SAVED_NEAR = 0.01
SAVED_WANTED = 0.5

RULES: dict[Admission, str] = {"overlap": "ECHO-2", "visible": "visible"}


def main() -> int:
    """Compute, print and judge."""
    parser = argparse.ArgumentParser(prog="bench paper", description=__doc__)
    parser.add_argument("--svg", type=Path, help="folder for the figures")
    options = parser.parse_args(sys.argv[1:])
    quick = quick_from_environment()
    stalenesses = knee.STALENESS[:1] if quick else knee.STALENESS
    bench = Bench("paper", inputs={"staleness": stalenesses, "broadcast_s": BROADCAST_S}, quick=quick)
    judge_table2(bench)
    judge_knee(bench, stalenesses)
    show_spread(bench)
    judge_headline(bench)
    if options.svg:
        draw(options.svg)
    return bench.finish()


def judge_table2(bench: Bench) -> None:
    """Each row beside the published one."""
    for ours, published in zip(table2.reproduced(), table2.PUBLISHED, strict=True):
        bench.measure(f"Table 2, {ours.run}: $/step", ours.cost, unit="$")
        bench.measure(f"Table 2, {ours.run}: wait", ours.wait_s, unit="s")
        bench.goal(f"Table 2, {ours.run}: $/step ÷ published", ours.cost / published.cost, **_about(1.0, NEAR))
        bench.goal(
            f"Table 2, {ours.run}: wait - published, s", ours.wait_s - published.wait_s, **_about(0, WAIT_NEAR_S)
        )
        bench.check(f"Table 2, {ours.run}: {published.machines} machines", ours.machines == published.machines)


def judge_knee(bench: Bench, stalenesses: tuple[int, ...]) -> None:
    """Compare the least pool without a waiting learner with the formula; measure the waste of larger pools."""
    for staleness in stalenesses:
        for admission, name in RULES.items():
            predicted, simulated = knee.foretold(staleness, admission), knee.knee(staleness, admission)
            bench.measure(f"Figure 3c, S = {staleness}, {name}: foretold knee", predicted, unit="workers")
            bench.measure(f"Figure 3c, S = {staleness}, {name}: simulated knee", simulated, unit="workers")
            for workers in (8, 16):
                in_vain = knee.simulated(staleness, admission, workers)["discarded_share"]
                label = f"Figure 3c, S = {staleness}, {name}: in vain, {workers} workers"
                bench.measure(label, 100 * in_vain, unit="%")
            goal = f"Figure 3c, S = {staleness}, {name}: simulated ÷ foretold knee"
            bench.goal(goal, simulated / predicted, **_about(1.0, KNEE_NEAR))


def show_spread(bench: Bench) -> None:
    """Show the curves of Figure 4, for the paper's nine workers and for sixty-four."""
    for workers in (9, 64):
        for source in spread.SOURCES_MBIT:
            star, trees = spread.star_limited(workers, source), spread.pipelined(workers, source)
            bench.measure(f"Figure 4, {workers} workers, {source} Mbit/s: star", star, unit="s")
            bench.measure(f"Figure 4, {workers} workers, {source} Mbit/s: trees", trees, unit="s")


def judge_headline(bench: Bench) -> None:
    """Check the saving against central training."""
    lines = {line.way: line for line in headline.lines()}
    for line in lines.values():
        bench.measure(f"headline, {line.way}: $/step, {line.workers} workers", line.cost, unit="$")
        bench.measure(f"headline, {line.way}: saved against sync", 100 * line.saved, unit="%")
    for line in headline.rough(1 if bench.quick else 6):
        bench.measure(f"volunteers, {line.way}: $/step, {line.workers} workers", line.cost, unit="$")
        bench.measure(f"volunteers, {line.way}: saved against sync", 100 * line.saved, unit="%")
        bench.measure(f"volunteers, {line.way}: learner idle", 100 * line.bubble, unit="%")
        bench.measure(f"volunteers, {line.way}: in vain", 100 * line.in_vain, unit="%")
    published = lines["ECHO-2's rule, S = 3"]
    for central, saved in SAVED_PUBLISHED.items():
        saving = 1 - published.cost / lines[f"central, {central}"].cost
        bench.goal(f"headline: saved against {central}, as published", saving, **_about(saved, SAVED_NEAR))
    best = max(line.saved for line in lines.values() if line.workers)
    bench.goal("headline: saved against sync by visible versions and patches", best, at_least=SAVED_WANTED)


def draw(folder: Path) -> None:
    """Figures 3c and 4 as SVG."""
    curves = {
        f"{name}, S = {staleness}": [
            (workers, knee.simulated(staleness, admission, workers)["bubble"]) for workers in knee.WORKERS
        ]
        for admission, name in RULES.items()
        for staleness in (3, 6, 11)
    }
    title = "Share of time that the learner waits, against the number of workers (simulated)"
    (folder / "paper_knee.svg").write_text(report.lines(title, curves, right=max(knee.WORKERS), top=0.8))
    spreads = {
        "star, unlimited": [(count, spread.star_unlimited(count)) for count in spread.WORKERS],
        **{
            f"{name}, {source} Mbit/s": [(count, seconds(count, source)) for count in spread.WORKERS]
            for source in spread.SOURCES_MBIT
            for name, seconds in (("star", spread.star_limited), ("trees", spread.pipelined))
        },
        "trees, 300 Mbit/s, patches": [
            (count, spread.pipelined(count, 300, spread.PATCH_SHARE * MODEL_MB)) for count in spread.WORKERS
        ],
    }
    title = "Seconds from publication to the last worker's first token, against the number of workers (fluid links)"
    (folder / "paper_spread.svg").write_text(report.lines(title, spreads, right=max(spread.WORKERS), top=6000))


def _about(value: float, near: float) -> dict[str, float]:
    return {"at_least": value - near, "at_most": value + near}


if __name__ == "__main__":
    raise SystemExit(main())
