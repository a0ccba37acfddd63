"""Figure 3c: how long the learner waits, against the number of workers; simulated, with the foretold knee.

- Workers give what the machines of Table 2 give. Rollouts travel in groups of eight here, so that a group is short
  against an update, as single rollouts are in the paper.
"""

from dataclasses import replace
from functools import cache
from typing import Any

from bench.paper.setting import BROADCAST_S, ROLLOUTS, TRAIN_S, WORKER_PER_HOUR, WORKER_RATE
from coordinator.sim.report import figures
from coordinator.sim.scenario import Admission, Scenario, SimulatedPool
from coordinator.sim.world import Simulation

STALENESS = (3, 4, 6, 11)
WORKERS = tuple(range(3, 13))
GROUP = 8
NODES = 8
"""The number of nodes in the search for the knee, where throughput varies and their number does not."""

IDLE = 0.005
"""A learner that waits less than this is busy."""

HALVINGS = 7


def scenario(
    staleness: int,
    admission: Admission,
    *,
    workers: int,
    rate: float = WORKER_RATE,
    broadcast_s: float = BROADCAST_S,
) -> Scenario:
    """The paper's round with so many equal workers."""
    return Scenario(
        staleness=staleness,
        groups_per_update=ROLLOUTS // GROUP,
        updates=30 + 4 * staleness,
        train_s=TRAIN_S,
        broadcast_s=broadcast_s,
        admission=admission,
        pool=SimulatedPool(nodes=workers, group_s=GROUP / rate, price_per_hour=WORKER_PER_HOUR),
    )


@cache
def simulated(staleness: int, admission: Admission, workers: int) -> dict[str, Any]:
    """Return the figures of a simulated run."""
    chosen = scenario(staleness, admission, workers=workers)
    return figures(chosen, Simulation(chosen).run())


def foretold(staleness: int, admission: Admission, broadcast_s: float = BROADCAST_S) -> float:
    """μ_min, in workers."""
    alone = scenario(staleness, admission, workers=1, broadcast_s=broadcast_s)
    return GROUP * alone.rule.min_rate(replace(alone.load, rollout_s=0.0), alone.interval) / WORKER_RATE


def knee(staleness: int, admission: Admission) -> float:
    """The least throughput, in workers, at which the simulated learner is busy."""
    low, high = 0.5 * foretold(staleness, admission), 1.5 * foretold(staleness, admission)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        chosen = scenario(staleness, admission, workers=NODES, rate=middle * WORKER_RATE / NODES)
        busy = figures(chosen, Simulation(chosen).run())["bubble"] <= IDLE
        low, high = (low, middle) if busy else (middle, high)
    return (low + high) / 2
