"""`make bench-broadcast`: every cell and every disturbance, against the goals.

- `--cells 8:3:uniform …` chooses cells, `--contenders` who takes part, `--rounds` how often, `--disturb` the cell of
  the disturbances (`none` leaves them out); goals that were not measured are not judged.
- `--worker-mbit`, `--together-mbit` and `--mib` size links and payload, so that the links are the limit, not the cores;
  a cell may name a payload of its own, as in `16:3:mixed:32`.
- Cells like `8:3:uniform:nat` have half of their workers behind NAT, `8:3:uniform:nat75` three quarters; they need
  nftables, and are left out without it.
- Links are shared by CUBIC, or by Reno where the host lets no namespace have that:
  `sysctl net.ipv4.tcp_allowed_congestion_control="reno cubic"` does.
- Every cell of ours is played on paper, too (`bench.simulation`), and both must agree within 15 %.
- `--laps FILE` saves every lap as it ends; laps that are in the file already count, and `--rounds 0` only reports them.
- `--plots FOLDER` writes the plots; the timelines of all laps lie beside the record, for whoever looks for idle links.
"""

import argparse
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bench.broadcast import paper
from bench.broadcast.cells import MIB, Cell, parse
from bench.broadcast.disturb import UNDISTURBED, disturb
from bench.broadcast.laps import Laps
from bench.broadcast.net import congestion_control, obstacle
from bench.broadcast.race import CONTENDERS, Lap, race
from bench.broadcast.report import case, received, summary, write_plots, write_timelines
from bench.harness import RESULTS, Bench, quick_from_environment

CELLS = [
    f"{workers}:{factor}:{links}" + (":32" if workers == 16 else "")  # at 5 Mbit/s each, half as much takes as long
    for workers in (4, 8, 16)
    for factor in (8, 3)
    for links in ("uniform", "mixed")
]
CELLS += [f"{workers}:3:uniform:{behind}" for workers in (4, 8) for behind in ("nat", "nat75")]
QUICK_CELLS = ["4:3:uniform"]

BOUND_MAX = 1.15
DISTURBED_MAX = 1.3


def main() -> int:
    """Measure, print and judge."""
    options = arguments(sys.argv[1:])
    if said := obstacle():
        print(f"bench broadcast is left out: {said}")
        return 0
    for number in (signal.SIGINT, signal.SIGTERM):  # so that the namespaces go, too, in the background as well
        signal.signal(number, signal.default_int_handler)
    cells = [cell_of(text, options) for text in options.cells]
    if any(cell.nat_percent for cell in cells) and (said := obstacle(nat=True)):
        print(f"cells behind NAT are left out: {said}")
        cells = [cell for cell in cells if not cell.nat_percent]
    inputs = {name: value for name, value in vars(options).items() if name not in ("plots", "laps")}
    bench = Bench("broadcast", inputs=inputs | {"links are shared by": congestion_control()})
    book = Laps(options.laps)
    laps = {cell: measure_cell(bench, book, cell, options.contenders, options.rounds) for cell in cells}
    for cell in cells:
        judge_cell(bench, cell, options.contenders)
    if options.disturb != "none":
        measure_disturbances(bench, cell_of(options.disturb, options), options.rounds)
    write_timelines(laps, RESULTS / "broadcast-timelines.json")
    if options.plots:
        write_plots(laps, options.plots)
    return bench.finish()


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The options; QUICK=1 makes their defaults small."""
    quick = quick_from_environment()
    parser = argparse.ArgumentParser(prog="bench broadcast", description=__doc__)
    parser.add_argument("--cells", nargs="*", default=QUICK_CELLS if quick else CELLS, metavar="N:SOURCE:LINKS")
    parser.add_argument("--contenders", nargs="*", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=1 if quick else 3)
    parser.add_argument("--worker-mbit", type=float, default=20.0)
    parser.add_argument(
        "--together-mbit", type=float, default=80.0, help="at most, for what all workers together receive"
    )
    parser.add_argument("--mib", type=float, default=8 if quick else 64)
    parser.add_argument("--disturb", default="4:3:uniform" if quick else "8:8:uniform", metavar="N:SOURCE:LINKS")
    parser.add_argument("--plots", type=Path)
    parser.add_argument("--laps", type=Path)
    return parser.parse_args(words)


def cell_of(text: str, options: argparse.Namespace) -> Cell:
    """A cell with its rates and payload; the more workers, the slower their links must be for the cores to keep up."""
    cell = parse(text, worker_mbit_s=options.worker_mbit, size_bytes=int(options.mib * MIB))
    return cell.within(options.together_mbit)


def measure_cell(bench: Bench, book: Laps, cell: Cell, contenders: Sequence[str], rounds: int) -> list[Lap]:
    """Run what is missing of a cell, saying after each lap how it went; then record every lap."""
    done = Counter(lap.contender for lap in book.of(cell, contenders))
    for lap in race(cell, contenders, rounds, done):
        book.add(cell, lap)
        print(summary(cell, lap), flush=True)
    laps = book.of(cell, contenders)
    for lap in laps:
        name, outcome = case(cell, lap.contender), lap.outcome
        bench.measure(name, outcome.completion_s, unit="s")
        bench.measure(f"{name} / bound", outcome.completion_s / cell.bound_s, unit="×")
        bench.measure(f"{name}, mean worker", outcome.mean_s, unit="s")
        bench.measure(f"{name}, received / payload", received(cell, lap), unit="×")
        bench.measure(f"{name}, cores busy", lap.use.cores)
    bench.check(f"{cell.name}: no bad byte", not any(lap.outcome.bad_bytes for lap in laps))
    return laps


def judge_cell(bench: Bench, cell: Cell, contenders: Sequence[str]) -> None:
    """Check our results in a cell against our goals."""
    if "ours" in contenders:
        ratio = bench.median(f"{case(cell, 'ours')} / bound")
        bench.goal(f"{cell.name}: at most {BOUND_MAX} × the bound", ratio, at_most=BOUND_MAX)
        bench.measure(f"{cell.name} on paper", paper.completion_s(cell), unit="s")
        beside = bench.median(case(cell, "ours")) / bench.median(f"{cell.name} on paper")
        bounds = (1 - paper.AGREES_WITHIN, 1 + paper.AGREES_WITHIN)
        bench.goal(f"{cell.name}: as on paper", beside, at_least=bounds[0], at_most=bounds[1])
    if {"ours", "libtorrent"} <= set(contenders):
        ratio = bench.ratio(f"{cell.name}: ours / libtorrent", case(cell, "ours"), case(cell, "libtorrent"))
        bench.goal(f"{cell.name}: faster than libtorrent", ratio, at_most=0.999)


def measure_disturbances(bench: Bench, cell: Cell, rounds: int) -> None:
    """Every disturbance against the undisturbed time of the same workers."""
    wrong = lies = 0
    cases: list[str] = []
    for disturbed in disturb(cell, rounds):
        wrong += disturbed.outcome.bad_bytes
        lies += disturbed.lies
        bench.measure(case(cell, disturbed.case), disturbed.outcome.completion_s, unit="s")
        print(f"{case(cell, disturbed.case)}: {disturbed.outcome.completion_s:.2f} s for the others", flush=True)
        cases += [disturbed.case] if disturbed.case not in (*cases, UNDISTURBED) else []
    for name in cases:
        ratio = bench.ratio(f"{case(cell, name)} / undisturbed", case(cell, name), case(cell, UNDISTURBED))
        bench.goal(f"one {name}: at most {DISTURBED_MAX} × undisturbed", ratio, at_most=DISTURBED_MAX)
    bench.measure(f"{cell.name} chunks sent with a wrong byte", lies, unit="chunks")
    bench.check("disturbed: wrong bytes were sent, and none applied", lies > 0 and wrong == 0)


if __name__ == "__main__":
    raise SystemExit(main())
