"""What is simulated: a pool of nodes with their links, a learner, a rule of admission, and a seed."""

import math
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal

from coordinator.config import Config
from coordinator.rules.capacity import OVERLAP, VISIBLE, AdmissionRule, PoolLoad
from coordinator.rules.fleet_choice import FleetRules
from coordinator.rules.topology import NodeLinks, fluid_bound_s
from coordinator.rules.trust import TrustRules as Audits

HOUR_S = 3600.0
BYTES_PER_MBIT = 1e6 / 8

Admission = Literal["visible", "overlap", "buffer"]


@dataclass(frozen=True)
class Links:
    """What a version travels over; with no size, how long it takes is drawn around `Scenario.broadcast_s`."""

    size_mb: float = 0.0
    """Size of a published version, in MB."""
    source_mbit: float = 1000.0
    node_mbit: float = 100.0
    node_up_mbit: float = 20.0
    spread: float = 0.0
    """Sigma of a log-normal, for each direction of each node."""
    load_s: float = 0.0
    """From the last byte to the first token."""
    hear_s: float = 0.0
    """From publication until nodes begin to fetch."""


@dataclass(frozen=True)
class SimulatedPool:
    """Nodes that differ: spreads are the sigma of a log-normal whose mean is what is named."""

    nodes: int = 100
    group_s: float = 60.0
    """How long a node samples one group, when it samples `at_once` of them together."""
    at_once: int = 1
    speed_spread: float = 0.0
    length_spread: float = 0.0
    """Of the lengths of groups: 1 makes one group in a hundred more than six times as long as the mean."""
    foresight: float = 0.0
    """How much of that is the prompt's, and so expected when it comes up; the rest is the samples' own."""
    price_per_hour: float = 0.35
    price_spread: float = 0.0
    stay_s: float = math.inf
    """How long nodes stay on average; then they are gone without a word."""
    preempt_s: float = math.inf
    """How long until a node is preempted, on average: it gives its leases back and goes."""
    away_s: float = HOUR_S
    """How long until somebody like them comes."""
    liars: float = 0.0
    """Share of nodes that forge: ten times as fast, as they say and as they answer, and wrong in every group."""


@dataclass(frozen=True)
class Scenario:
    """One run; the same one gives the same trace."""

    staleness: int = 4
    kappa: int = 0
    """Updates between publications; 0 takes what the rule advises."""
    groups_per_update: int = 128
    updates: int = 100
    train_s: float = 100.0
    train_spread: float = 0.0
    broadcast_s: float = 20.0
    broadcast_spread: float = 0.0
    links: Links = field(default_factory=Links)
    lease_s: float = 600.0
    """A lease that is not answered by then is given to somebody else."""
    admission: Admission = "visible"
    """`overlap` is the paper's: no sampling while a version is under way, no limit otherwise, and a filter by age.
    `buffer` is Echo's: sampling never pauses while there is room."""
    buffered_max: int = 0
    """Updates' worth of groups that may be under way or wait, for `buffer`; 0: 2 (S + 1)."""
    over_issue: int = 0
    """Late groups at most that a second node gets when the learner waits only for them."""
    continues: bool = False
    """Whether what a lost node has told of a group is gone on with."""
    lookahead: int = 0
    """Groups of which a node gets those that suit its speed; 0: the oldest."""
    gamma: float = 0.0
    """The fleet is kept at this times the least throughput; 0 lets everybody work."""
    rules: FleetRules = field(default_factory=FleetRules)
    audits: Audits = field(default_factory=Audits)
    audit_s: float = 60.0
    """From an answer to the verdict on it."""
    learner_price_per_hour: float = 12.24
    seed: int = 0
    pool: SimulatedPool = field(default_factory=SimulatedPool)

    @property
    def rule(self) -> AdmissionRule:
        return OVERLAP if self.admission == "overlap" else VISIBLE

    @property
    def load(self) -> PoolLoad:
        """In groups: what the capacity model is asked about this round."""
        return PoolLoad(
            staleness=self.staleness,
            rollouts_per_update=self.groups_per_update,
            train_s=self.train_s,
            broadcast_s=self.arrival_s,
            rollout_s=self.pool.group_s,
        )

    @property
    def arrival_s(self) -> float:
        """T_bcast as the capacity model is told it: over links, the bound for nodes that are all alike."""
        links = self.links
        if not links.size_mb:
            return self.broadcast_s
        one = NodeLinks("", up=links.node_up_mbit * BYTES_PER_MBIT, down=links.node_mbit * BYTES_PER_MBIT)
        everybody = [one] * self.pool.nodes
        return (
            fluid_bound_s(1e6 * links.size_mb, links.source_mbit * BYTES_PER_MBIT, everybody)
            + links.hear_s
            + links.load_s
        )

    @property
    def interval(self) -> int:
        """κ as it is used."""
        return self.kappa or self.rule.kappa(self.load)

    @property
    def room(self) -> int:
        """Of the buffer, in updates' worth."""
        return self.buffered_max or 2 * (self.staleness + 1)


def around(chance: Random, mean: float, spread: float) -> float:
    """A log-normal with this mean."""
    return mean * math.exp(chance.gauss(0.0, spread) - spread * spread / 2) if spread else mean


def scenario_of(config: Config, pool: SimulatedPool, **more: Any) -> Scenario:
    """What a round's file says, its mode included; where no strangers may join, only its own nodes are there."""
    own = pool if config.fleet.strangers else replace(pool, nodes=config.fleet.local_nodes)
    fleet, audit = config.fleet, config.audit
    fixed: dict[str, Any] = {
        "staleness": config.staleness.max_updates,
        "kappa": config.staleness.publish_every,
        "groups_per_update": config.learner.groups_per_update,
        "lease_s": config.leases.timeout_s,
        "admission": config.staleness.admission,
        "buffered_max": config.staleness.buffer_updates,
        "over_issue": config.leases.over_issue,
        "lookahead": config.leases.lookahead,
        "gamma": fleet.gamma,
        "rules": FleetRules(fleet.window_s, fleet.margin, fleet.dwell_s),
        "audits": Audits(
            audit.first_groups, audit.floor, audit.trusted_groups, audit.trusted_floor, audit.escrow_factor
        ),
        "pool": own,
    }
    return Scenario(**(fixed | more))
