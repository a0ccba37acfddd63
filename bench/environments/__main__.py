"""`make bench-environments`: turns of environments, their latency at a node, and whole rounds of episodes.

- `kinds`: turns per second of the environment side, by kind, and what the sandbox adds to a call.
- `latency`: the time from a submitted turn to the request for the next turn's first token at the node, without the
  environment's own time, against a lease's round trip; on loopback, and with 100 ms between node and coordinator.
- `throughput`: episodes of four turns of Sokoban in a round with two nodes, against a checkout of a commit before
  episodes were chains of leases, in which nodes played: `--before FOLDER`. Without the folder it is left out.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median

from bench.environments.delayed_line import DelayedLine, obstacle
from bench.environments.kinds import SAMPLES, WAYS, interpreter, kinds, turns_per_s
from bench.environments.latency import measured
from bench.environments.throughput import NODES, episodes_per_s
from bench.harness import Bench, Child, quick_from_environment
from bench.rounds.served import make_policy

PARTS = ("kinds", "latency", "throughput")
ROUND_TRIP_S = 0.1
FAR = f"{1000 * ROUND_TRIP_S:.0f} ms away"


def arguments(quick: bool) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="bench environments", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="checkout in which nodes play episodes")
    parser.add_argument("--rounds", type=int, default=1 if quick else 3)
    parser.add_argument("--kind-seconds", type=float, default=0.3 if quick else 1.0, help="of a kind, in each way")
    parser.add_argument("--turns", type=int, default=30 if quick else 60, help="next turns of a node in each round")
    parser.add_argument("--seconds", type=float, default=15 if quick else 40, help="of a measured round of episodes")
    return parser.parse_args()


def measure_kinds(bench: Bench, rounds: int, seconds: float) -> None:
    """Measure each kind that is installed, and judge the sandbox."""
    with closing(Child([interpreter(), "-P", "-m", "bench.environments.kinds"])) as child:
        there: dict[str, bool] = child.ask({})["kinds"]
        for kind in there:
            if not there[kind]:
                print(f"left out: {kind}, whose library is not installed", flush=True)
                continue
            answers = [(way, child.ask({"kind": kind, "way": way, "seconds": seconds})) for way in WAYS * rounds]
            for way, answer in answers:
                if error := answer.get("error"):
                    print(f"{kind}, {way}: {error}", flush=True)
                    continue
                bench.measure(f"{kind}, {way}", answer["turns_per_s"], unit="turns/s")
                bench.measure(f"{kind}, {way}, a call", 1000 * SAMPLES / answer["turns_per_s"], unit="ms")
            if bench.check(f"{kind} plays in its process", not any("error" in answer for _, answer in answers)):
                cost = bench.ratio(f"{kind}: sandbox / none", f"{kind}, sandbox, a call", f"{kind}, no sandbox, a call")
                bench.goal(f"{kind}: the sandbox costs at most half of a call", cost, at_most=1.5)


def measure_latency(bench: Bench, policy: Path, folder: Path, rounds: int, turns: int) -> None:
    """Measure turns and leases on both lines, and judge their ratio."""
    sokoban = next(kind for kind in kinds(folder) if kind.name == "sokoban")
    own_s = SAMPLES / turns_per_s(sokoban, "alone", 0.5)
    bench.measure("sokoban's own time of a turn", 1000 * own_s, unit="ms")
    lines = ["loopback", FAR]
    if reason := obstacle():
        print(f"left out: {FAR}, since {reason}", flush=True)
        lines.remove(FAR)
    for number in range(rounds):
        for name in lines:
            with _line(name) as line:
                seen = measured(policy, folder / f"{name} {number}", turns=turns, line=line)
            bench.measure(f"turn, {name}", 1000 * (median(seen.turns) - own_s), unit="ms")
            bench.measure(f"wait before the submission, {name}", 1000 * median(seen.waits), unit="ms")
            bench.measure(f"submission, {name}", 1000 * median(seen.submissions), unit="ms")
            bench.measure(f"lease, {name}", 1000 * median(seen.leases), unit="ms")
            bench.measure(f"next turns with the verdict, {name}", 100 * seen.share_at_once, unit="%")
    for name in lines:
        times = bench.ratio(f"turn / lease, {name}", f"turn, {name}", f"lease, {name}")
        bench.goal(f"a turn adds less than a lease's round trip, {name}", times, at_most=1.0)


@contextmanager
def _line(name: str) -> Iterator[DelayedLine | None]:
    if name != FAR:
        yield None
        return
    with DelayedLine(ROUND_TRIP_S) as line:
        yield line


def measure_throughput(
    bench: Bench, policy: Path, folder: Path, before: Path | None, rounds: int, seconds: float
) -> None:
    """Measure rounds of both checkouts in turns, and judge their ratio."""
    if before is None:
        print("left out: throughput, since --before names no checkout", flush=True)
        return
    for number in range(rounds):
        for case, code in (("chains", None), ("node-side", before)):
            rate = episodes_per_s(policy, folder / f"{case} {number}", seconds, before=code)
            bench.measure(f"{case}, episodes", rate, unit="/s")
            print(f"{number + 1} of {rounds}: {case}, {rate:.4g} episodes/s", flush=True)
    times = bench.ratio("episodes: chains / node-side", "chains, episodes", "node-side, episodes")
    bench.goal("chains of leases bring at least 0.8 of the episodes", times, at_least=0.8)


def main() -> int:
    """Measure, print and judge."""
    quick = quick_from_environment()
    chosen = arguments(quick)
    if tuple(chosen.parts) == ("throughput",) and chosen.before is None:
        print("The part throughput needs --before FOLDER.", file=sys.stderr)
        return 2
    inputs = {
        "parts": list(chosen.parts),
        "rounds": chosen.rounds,
        "kind_seconds": chosen.kind_seconds,
        "turns": chosen.turns,
    }
    inputs |= {"samples": SAMPLES, "nodes": NODES, "seconds": chosen.seconds, "before": chosen.before is not None}
    bench = Bench("environments", inputs=inputs, quick=quick)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "kinds" in chosen.parts:
            measure_kinds(bench, chosen.rounds, chosen.kind_seconds)
        policy = make_policy(folder / "policy") if set(chosen.parts) - {"kinds"} else folder
        if "latency" in chosen.parts:
            measure_latency(bench, policy, folder, chosen.rounds, chosen.turns)
        if "throughput" in chosen.parts:
            measure_throughput(bench, policy, folder, chosen.before, chosen.rounds, chosen.seconds)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
