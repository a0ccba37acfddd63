"""The headline: dollars per step against central training, and what our rule and patches add on top.

- Central: eight A100 sample and train in turns (sync) or side by side (async), for as long as the paper says.
- ECHO-2: four A100 and the fewest RTX 5090 that keep them busy by its rule. Ours: the same by admission on the visible
  version, simulated; then with patches in place of whole versions. No reserve (γ = 1) in any of them.
- Then what no table of the paper has: the same on volunteers' machines, which are preempted, unequal, and sample
  answers whose lengths have a heavy tail; the pool that makes a step cost the least, with ever more of what we add.
"""

import math
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from bench.paper.knee import foretold, scenario
from bench.paper.setting import (
    BROADCAST_S,
    CENTRAL_PER_HOUR,
    HOUR_S,
    LEARNER_PER_HOUR,
    LOAD_S,
    MODEL_MB,
    STALENESS,
    TRAIN_S,
    WORKER_PER_HOUR,
    WORKER_RATE,
)
from bench.paper.spread import MBIT, PATCH_SHARE, WORKER_MBIT
from coordinator.sim.report import figures
from coordinator.sim.scenario import Admission, Scenario, SimulatedPool
from coordinator.sim.world import Simulation

SYNC_S, ASYNC_S = 1508.2, 1582.3
PATCHED_S = PATCH_SHARE * MODEL_MB * 1e6 / (WORKER_MBIT * MBIT) + LOAD_S

PATIENCE = 4
"""Larger pools that are tried after the cheapest so far."""


@dataclass(frozen=True)
class Line:
    """A way to train: workers beside the learner, the learner's waiting time, and dollars per step."""

    way: str
    workers: int
    bubble: float
    cost: float
    in_vain: float = 0.0

    @property
    def saved(self) -> float:
        """Return the saving against central synchronous training."""
        return 1 - self.cost / (CENTRAL_PER_HOUR * SYNC_S / HOUR_S)


def lines() -> list[Line]:
    """Central, then the swarm with more and more of what we add, then what no swarm can go below."""
    return [
        Line("central, async", 0, 0.0, CENTRAL_PER_HOUR * ASYNC_S / HOUR_S),
        Line("central, sync", 0, 0.0, CENTRAL_PER_HOUR * SYNC_S / HOUR_S),
        _swarm("ECHO-2's rule, S = 3", 3, "overlap"),
        _swarm("visible versions, S = 3", 3, "visible"),
        _swarm("visible versions, S = 1", 1, "visible"),
        _swarm("visible versions and patches, S = 1", 1, "visible", PATCHED_S),
        Line("the learner alone, were rollouts free", 0, 0.0, LEARNER_PER_HOUR * TRAIN_S / HOUR_S),
    ]


VOLUNTEERS = replace(
    scenario(STALENESS, "visible", workers=1),
    groups_per_update=128,
    updates=40,
    lease_s=1800.0,
    pool=SimulatedPool(
        group_s=8 * 16 / WORKER_RATE,
        at_once=8,
        speed_spread=0.5,
        length_spread=0.8,
        foresight=0.5,
        price_per_hour=WORKER_PER_HOUR,
        preempt_s=2 * 3600.0,
        away_s=600.0,
    ),
)
"""A worker samples eight groups of sixteen together, is preempted every two hours, and is back in ten minutes."""

ROUGH: dict[str, dict[str, Any]] = {
    "ECHO-2's rule": {"admission": "overlap"},
    "visible versions": {},
    "… and patches": {"broadcast_s": PATCHED_S},
    "… and continuation": {"broadcast_s": PATCHED_S, "continues": True},
    "… and late groups given twice": {"broadcast_s": PATCHED_S, "continues": True, "over_issue": 4},
    "… and long groups to fast nodes": {
        "broadcast_s": PATCHED_S,
        "continues": True,
        "over_issue": 4,
        "lookahead": 32,
    },
}

POOLS = range(4, 41)


def rough(seeds: int) -> list[Line]:
    """Volunteers, with more and more of what we add: the cheapest pool of each."""
    return [_cheapest(way, replace(VOLUNTEERS, **change), seeds) for way, change in ROUGH.items()]


def _cheapest(way: str, chosen: Scenario, seeds: int) -> Line:
    """The pool that makes a step cost the least: what workers cost weighed against a learner that waits."""
    best: Line | None = None
    for workers in POOLS:
        pools = [replace(chosen, pool=replace(chosen.pool, nodes=workers), seed=seed) for seed in range(seeds)]
        results = [figures(scenario, Simulation(scenario).run()) for scenario in pools]
        line = Line(
            way,
            workers,
            fmean(result["bubble"] for result in results),
            fmean(result["cost_per_update"] for result in results),
            fmean(result["discarded_share"] for result in results),
        )
        if best is None or line.cost < best.cost:
            best = line
        elif workers > best.workers + PATIENCE:
            break
    assert best is not None
    return best


def _swarm(way: str, staleness: int, admission: Admission, broadcast_s: float = BROADCAST_S) -> Line:
    workers = math.ceil(foretold(staleness, admission, broadcast_s))
    chosen = scenario(staleness, admission, workers=workers, broadcast_s=broadcast_s)
    result = figures(chosen, Simulation(chosen).run())
    return Line(way, workers, result["bubble"], result["cost_per_update"])
