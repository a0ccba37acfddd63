"""The headline: dollars per step against central training, and what our rule and patches add on top.

- Central: eight A100 sample and train in turns (sync) or side by side (async), for as long as the paper says.
- ECHO-2: four A100 and the fewest RTX 5090 that keep them busy by its rule. Ours: the same by admission on the visible
  version, simulated; then with patches in place of whole versions. No reserve (γ = 1) in any of them.
"""

import math
from dataclasses import dataclass

from bench.paper.knee import foretold, scenario
from bench.paper.setting import BROADCAST_S, CENTRAL_PER_HOUR, HOUR_S, LEARNER_PER_HOUR, LOAD_S, MODEL_MB, TRAIN_S
from bench.paper.spread import MBIT, PATCH_SHARE, WORKER_MBIT
from coordinator.sim.report import figures
from coordinator.sim.scenario import Admission
from coordinator.sim.world import Simulation

SYNC_S, ASYNC_S = 1508.2, 1582.3


@dataclass(frozen=True)
class Line:
    """One way to train: workers beside the learner, how long it waits, and dollars per step."""

    way: str
    workers: int
    bubble: float
    cost: float

    @property
    def saved(self) -> float:
        """Against central synchronous training."""
        return 1 - self.cost / (CENTRAL_PER_HOUR * SYNC_S / HOUR_S)


def lines() -> list[Line]:
    """Central, then the swarm with more and more of what we add, then what no swarm can go below."""
    patched_s = PATCH_SHARE * MODEL_MB * 1e6 / (WORKER_MBIT * MBIT) + LOAD_S
    return [
        Line("central, async", 0, 0.0, CENTRAL_PER_HOUR * ASYNC_S / HOUR_S),
        Line("central, sync", 0, 0.0, CENTRAL_PER_HOUR * SYNC_S / HOUR_S),
        _swarm("ECHO-2's rule, S = 3", 3, "overlap"),
        _swarm("visible versions, S = 3", 3, "visible"),
        _swarm("visible versions, S = 1", 1, "visible"),
        _swarm("visible versions and patches, S = 1", 1, "visible", patched_s),
        Line("the learner alone, were rollouts free", 0, 0.0, LEARNER_PER_HOUR * TRAIN_S / HOUR_S),
    ]


def _swarm(way: str, staleness: int, admission: Admission, broadcast_s: float = BROADCAST_S) -> Line:
    workers = math.ceil(foretold(staleness, admission, broadcast_s))
    chosen = scenario(staleness, admission, workers=workers, broadcast_s=broadcast_s)
    found = figures(chosen, Simulation(chosen).run())
    return Line(way, workers, found["bubble"], found["cost_per_update"])
