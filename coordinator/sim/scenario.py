"""What is simulated: a pool of nodes, a learner, a rule of admission, and a seed."""

import math
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from coordinator.capacity import OVERLAP, VISIBLE, Load, Rule
from coordinator.fleet import Rules

HOUR_S = 3600.0

Admission = Literal["visible", "overlap"]


@dataclass(frozen=True)
class Pool:
    """Nodes that differ: spreads are the sigma of a log-normal whose mean is what is named."""

    nodes: int = 100
    group_s: float = 60.0
    """How long a node samples one group, when it samples `at_once` of them together."""
    at_once: int = 1
    speed_spread: float = 0.0
    length_spread: float = 0.0
    """Of the lengths of groups: 1 makes one group in a hundred more than six times as long as the mean."""
    price_per_hour: float = 0.35
    price_spread: float = 0.0
    stay_s: float = math.inf
    """How long nodes stay on average; with them goes what they were sampling."""
    away_s: float = HOUR_S
    """How long until somebody like them comes."""


@dataclass(frozen=True)
class Scenario:
    """One run; the same one gives the same trace."""

    staleness: int = 4
    kappa: int = 0
    """Updates between publications; 0 takes what the rule advises."""
    groups_per_update: int = 128
    updates: int = 100
    train_s: float = 100.0
    broadcast_s: float = 20.0
    broadcast_spread: float = 0.0
    lease_s: float = 600.0
    """After this a group that was lost with its node is offered again."""
    admission: Admission = "visible"
    """`overlap` is the paper's: no sampling while a version is under way, no limit otherwise, and a filter by age."""
    gamma: float = 0.0
    """The fleet is kept at this times the least throughput; 0 lets everybody work."""
    rules: Rules = field(default_factory=Rules)
    learner_price_per_hour: float = 12.24
    seed: int = 0
    pool: Pool = field(default_factory=Pool)

    @property
    def rule(self) -> Rule:
        return OVERLAP if self.admission == "overlap" else VISIBLE

    @property
    def load(self) -> Load:
        """In groups: what the capacity model is asked about this round."""
        return Load(
            staleness=self.staleness,
            rollouts_per_update=self.groups_per_update,
            train_s=self.train_s,
            broadcast_s=self.broadcast_s,
            rollout_s=self.pool.group_s,
        )

    @property
    def interval(self) -> int:
        """κ as it is used."""
        return self.kappa or self.rule.kappa(self.load)


def around(chance: Random, mean: float, spread: float) -> float:
    """A log-normal with this mean."""
    return mean * math.exp(chance.gauss(0.0, spread) - spread * spread / 2) if spread else mean
