"""Table 2: what peers and the choice by cost are worth."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import mean

from bench.paper.setting import GAMMA, HOUR_S, LEARNER_PER_HOUR, MACHINES, load
from coordinator.rules.capacity import OVERLAP
from coordinator.rules.fleet_choice import FleetCandidate, cheapest_cover

DRAWS = 2000


@dataclass(frozen=True)
class Row:
    """A run: machines, dollars per step, seconds of broadcast and of waiting in a period of κ steps."""

    run: str
    machines: int
    cost: float
    broadcast_s: float
    wait_s: float


PUBLISHED = (
    Row("full", 9, 8.098, 1437.0, 0.0),
    Row("without peers, 9", 9, 8.432, 1830.0, 131.9),
    Row("without peers, 10", 10, 8.630, 1872.0, 84.1),
    Row("without choice by cost", 9, 9.339, 1437.0, 0.0),
)


def reproduced(seed: int = 0) -> list[Row]:
    """Return the rows by our model; how many machines the full run takes is the fleet's own decision."""
    full, nine, ten, blind = PUBLISHED
    target = GAMMA * OVERLAP.min_rate(load(full.broadcast_s), OVERLAP.kappa(load(full.broadcast_s)))
    order = sorted(MACHINES, key=lambda machine: machine.cost_per_group)
    chance = Random(seed)
    drawn = [_row(blind, chance.sample(MACHINES, blind.machines)) for _ in range(DRAWS)]
    average = Row(
        blind.run, blind.machines, mean(row.cost for row in drawn), blind.broadcast_s, mean(row.wait_s for row in drawn)
    )
    return [
        _row(full, cheapest_cover(MACHINES, target)),
        _row(nine, order[: nine.machines]),
        _row(ten, order[: ten.machines]),
        average,
    ]


def _row(like: Row, machines: Sequence[FleetCandidate]) -> Row:
    demand = load(like.broadcast_s)
    kappa = OVERLAP.kappa(load())
    period_s = OVERLAP.period_s(demand, kappa, sum(machine.rate for machine in machines))
    hourly = LEARNER_PER_HOUR + HOUR_S * sum(machine.cost for machine in machines)
    cost = hourly * period_s / kappa / HOUR_S
    return Row(like.run, len(machines), cost, like.broadcast_s, period_s - kappa * demand.train_s)
