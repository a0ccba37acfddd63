"""`make bench-anchor`: a real swarm beside the simulator, from the same inputs.

- Given to both: machines, links, prices, S, κ, admission. Measured, and given to the simulator: how long an update
  takes, how large a version is, how long nodes take to hear of one and to load it, and what an answer's way adds to
  its sampling. Foretold, and held against what the real swarm did: the rest.
- What is foretold is the mean of several seeds: the real swarm has one draw of lengths, and no seed.
- Rounds are appended to `bench/results/anchor.jsonl` as they end, and a run goes on where the last one stopped.
- `--admissions`, `--rounds` and `--updates` choose what is played; about eight minutes each, nearly all of it asleep.
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

from bench.anchor.books import Measured
from bench.anchor.setting import ADMISSIONS, Case, machines
from bench.anchor.swarm import make_policy, play
from bench.broadcast.net import obstacle
from bench.harness import RESULTS, Bench, quick_from_environment
from coordinator.sim.report import figures
from coordinator.sim.world import Simulation

SEEDS = 16
NEAR = 0.1

SHARE_NEAR = 0.02
"""The tolerance of a share that is near zero, where a ratio says nothing."""

SHARES = ("bubble", "discarded share")

COMPARED = {
    "bubble": "bubble",
    "T_bcast": "broadcast_s",
    "discarded share": "discarded_share",
    "$/step": "cost_per_update",
    "age": "age_mean",
}
"""The figures that are compared, by the names of `Measured`."""


def foretold(case: Case, measured: Measured) -> Measured:
    """Run the round under the virtual clock."""
    given = case.scenario()
    links = replace(given.links, size_mb=measured.size_mb, hear_s=measured.hear_s, load_s=measured.load_s)
    seeded = [replace(given, train_s=measured.train_s, links=links, seed=seed) for seed in range(SEEDS)]
    predicted = [figures(scenario, Simulation(scenario, machines(measured.answer_s)).run()) for scenario in seeded]
    names = {"broadcast_s": "broadcast_median_s"}
    means = {name: fmean(line[names.get(name, name)] for line in predicted) for name in (*COMPARED.values(), "step_s")}
    return replace(measured, **means)


def rounds(admissions: list[str], wanted: int, updates: int, record: Path) -> Iterator[tuple[Case, Measured]]:
    """All that is wanted, of which only what is missing is played."""
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(wanted):
            for admission in ADMISSIONS:
                case = Case(admission, updates)
                done = [line["found"] for line in lines if line["case"] == asdict(case)]
                if admission not in admissions:
                    continue
                if number < len(done):
                    yield case, Measured(**done[number])
                    continue
                policy = make_policy(record.with_name("anchor-policy"))
                measured = play(case, policy, Path(scratch) / f"{admission}-{number}")
                record.parent.mkdir(parents=True, exist_ok=True)
                with record.open("a") as file:
                    file.write(json.dumps({"case": asdict(case), "found": asdict(measured)}) + "\n")
                yield case, measured


def compare(bench: Bench, case: Case, result: Measured) -> None:
    """Compare a measured round with its prediction."""
    predicted = foretold(case, result)
    for name in ("train_s", "size_mb", "answer_s", "hear_s", "load_s"):
        bench.measure(f"{case.admission}: given, {name}", getattr(result, name))
    for name, field in COMPARED.items():
        measured, said = getattr(result, field), getattr(predicted, field)
        bench.measure(f"{case.admission}, {name}: measured", measured)
        bench.measure(f"{case.admission}, {name}: foretold", said)
        if said:
            bench.measure(f"{case.admission}, {name}: measured / foretold", measured / said, unit="×")
    print(f"{case.admission}: measured {result}\n{case.admission}: foretold {predicted}", flush=True)


def judge(bench: Bench, admission: str) -> None:
    """Require each round within ten per cent of what its inputs foretold, or near it where both are near nothing."""
    for name in COMPARED:
        measured, predicted = (bench.median(f"{admission}, {name}: {which}") for which in ("measured", "foretold"))
        goal = f"{admission}, {name}: measured against foretold"
        if name in SHARES and max(measured, predicted) < 5 * SHARE_NEAR:
            bench.goal(goal, measured - predicted, at_least=-SHARE_NEAR, at_most=SHARE_NEAR)
        else:
            ratio = bench.median(f"{admission}, {name}: measured / foretold")
            bench.goal(goal, ratio, at_least=1 - NEAR, at_most=1 + NEAR)


def main() -> int:
    """Play, compare and judge."""
    quick = quick_from_environment()
    parser = argparse.ArgumentParser(prog="bench anchor", description=__doc__)
    parser.add_argument("--admissions", nargs="*", choices=ADMISSIONS, default=list(ADMISSIONS))
    parser.add_argument("--rounds", type=int, default=1 if quick else 3)
    parser.add_argument("--updates", type=int, default=6 if quick else 20)
    parser.add_argument("--record", type=Path, default=RESULTS / "anchor.jsonl")
    options = parser.parse_args()
    if said := obstacle():
        print(f"bench anchor is left out: {said}")
        return 0
    for number in (signal.SIGINT, signal.SIGTERM):  # so that the namespaces go, too, in the background as well
        signal.signal(number, signal.default_int_handler)
    inputs = {name: value for name, value in vars(options).items() if name != "record"}
    bench = Bench("anchor", inputs=inputs, quick=quick)
    for case, measured in rounds(options.admissions, options.rounds, options.updates, options.record):
        compare(bench, case, measured)
    for admission in options.admissions:
        judge(bench, admission)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
