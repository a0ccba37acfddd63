"""Figure 4: seconds until every worker has a version, against their number, in fluid links."""

from bench.paper.setting import LOAD_S, MODEL_MB
from coordinator.rules.topology import NodeLinks, fluid_bound_s, plan

WORKERS = (1, 2, 4, 8, 9, 10, 16, 32, 64)
SOURCES_MBIT = (300, 800)
WORKER_MBIT = 100
PATCH_SHARE = 0.01
"""A patch's part of a version at learning rate 1e-6, as bench-delta measures it, rounded up."""

MBIT = 1e6 / 8


def star_unlimited(_workers: int, size_mb: float = MODEL_MB) -> float:
    """A source that is never the limit."""
    return 1e6 * size_mb / (WORKER_MBIT * MBIT) + LOAD_S


def star_limited(workers: int, source_mbit: float, size_mb: float = MODEL_MB) -> float:
    """A source that sends the whole to each."""
    return 1e6 * size_mb / MBIT * max(1 / WORKER_MBIT, workers / source_mbit) + LOAD_S


def pipelined(workers: int, source_mbit: float, size_mb: float = MODEL_MB) -> float:
    """Return the seconds of a broadcast at the rate of our planner's trees, never below the bound of any scheme."""
    nodes = [NodeLinks(f"n{number}", WORKER_MBIT * MBIT, WORKER_MBIT * MBIT) for number in range(workers)]
    rate = plan(source_mbit * MBIT, nodes).rate
    return max(1e6 * size_mb / rate, fluid_bound_s(1e6 * size_mb, source_mbit * MBIT, nodes)) + LOAD_S
