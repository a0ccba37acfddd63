"""`make bench-simulation`: how near the fluid bound swarms of many sizes come, and what planning and messages cost.

- `--nodes`, `--links`, `--stripes` and `--believed` choose the cells; every one is judged, and run with several seeds.
- A node costs about the same in a swarm of any size. `ARGS="--nodes 1000 --chunks 256 --tick 1 --seeds 1"` takes
  minutes, the same with 10000 about an hour, and 5 GiB. A tick of a whole chunk's time means one decision per chunk and
  comes out within a few percent of the default.
- `--rules ahead_s=10 window=3` tries other numbers for the picker's rules.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from bench.harness import Bench, quick_from_environment
from bench.simulation.swarms import BELIEFS, LINK_BYTES_PER_S, MIXES, believed, swarm
from bench.simulation.world import TICK, Simulation
from coordinator.rules import topology
from protocol.limits import KIB
from swarm_node.picker.sources import PickerRules

PLANNED_NODES = (100, 1000, 10_000)
BOUND_MAX = 1.25
LIMIT = 10
"""Times the bound, and a run is given up."""


@dataclass(frozen=True)
class Cell:
    """A swarm with the way in which its trees are planned."""

    nodes: int
    links: str
    stripes: int
    belief: str

    @property
    def name(self) -> str:
        return f"{self.nodes} nodes, {self.links}, {self.stripes} stripes" + (
            f", believed {self.belief}" if self.belief != "true" else ""
        )


def main() -> int:
    """Measure, print and judge."""
    options = arguments(sys.argv[1:])
    bench = Bench("simulation", inputs=vars(options))
    for cell in cells(options):
        ratios = [run(bench, cell, seed, options) for seed in range(options.seeds)]
        bench.goal(f"{cell.name}: at most {BOUND_MAX} × the bound", max(ratios), at_most=BOUND_MAX)
    for count, links in product(PLANNED_NODES, options.links):
        for _ in range(3):
            began = time.perf_counter()
            topology.plan(options.source * LINK_BYTES_PER_S, swarm(count, links))
            bench.measure(f"planning {count} nodes, {links}", time.perf_counter() - began, unit="s")
    return bench.finish()


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The options; QUICK=1 makes their defaults small."""
    quick = quick_from_environment()
    parser = argparse.ArgumentParser(
        prog="bench simulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", nargs="*", type=int, default=[10] if quick else [10, 30, 100])
    parser.add_argument("--links", nargs="*", choices=list(MIXES), default=list(MIXES))
    parser.add_argument("--stripes", nargs="*", type=int, default=[topology.STRIPES])
    parser.add_argument(
        "--believed", nargs="*", choices=list(BELIEFS), default=["true"], help="what the planner takes the uplinks for"
    )
    parser.add_argument("--source", type=float, default=8.0, help="the source's uplink, in units of a link")
    parser.add_argument("--chunks", type=int, default=256 if quick else 512)
    parser.add_argument("--chunk-kib", type=int, default=1024)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--tick", type=float, default=TICK, help="in units of a chunk's time on a downlink")
    parser.add_argument("--seeds", type=int, default=1 if quick else 3)
    parser.add_argument("--rules", nargs="*", default=[], metavar="NAME=VALUE")
    return parser.parse_args(words)


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Every combination that was asked for."""
    for chosen in product(options.nodes, options.links, options.stripes, options.believed):
        yield Cell(*chosen)


def rules(words: Sequence[str]) -> PickerRules:
    """The picker's rules, with other numbers for some."""
    changed = {}
    for name, _, value in (word.partition("=") for word in words):
        kind = type(getattr(PickerRules(), name))
        changed[name] = kind(value)
    return replace(PickerRules(), **changed)


def run(bench: Bench, cell: Cell, seed: int, options: argparse.Namespace) -> float:
    """Run a broadcast; return its duration as a multiple of the bound."""
    nodes = swarm(cell.nodes, cell.links)
    source_up, chunk_bytes = options.source * LINK_BYTES_PER_S, options.chunk_kib * KIB
    bound_s = topology.fluid_bound_s(options.chunks * chunk_bytes, source_up, nodes)
    began = time.process_time()
    outcome = Simulation(
        source_up,
        nodes,
        plan=topology.plan(source_up, believed(nodes, cell.belief, seed), stripes=cell.stripes),
        chunks=options.chunks,
        chunk_bytes=chunk_bytes,
        latency_s=options.latency_ms / 1000,
        tick=options.tick,
        seed=seed,
        rules=rules(options.rules),
    ).run(limit_s=LIMIT * bound_s)
    assert len(outcome.done_s) == cell.nodes, "somebody did not finish"
    ratio = outcome.completion_s / bound_s
    bench.measure(f"{cell.name}: completion / bound", ratio, unit="×")
    bench.measure(f"{cell.name}: messages per node", outcome.messages / cell.nodes)
    bench.measure(f"{cell.name}: decisions per node", outcome.decisions / cell.nodes)
    bench.measure(f"{cell.name}: sent by the source", outcome.source_bytes / chunk_bytes / options.chunks, unit="×")
    bench.measure(f"{cell.name}: chunks twice", outcome.duplicate_bytes / chunk_bytes / cell.nodes, unit="per node")
    took_s = time.process_time() - began
    print(f"{cell.name}, seed {seed}: {ratio:.3f} × the bound, {took_s:.0f} CPU-s", flush=True)
    return ratio


if __name__ == "__main__":
    raise SystemExit(main())
