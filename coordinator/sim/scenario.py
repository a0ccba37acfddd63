"""The settings of a simulation: a pool of nodes with their links, a learner, a rule of admission, and a seed."""

import math
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal

from coordinator.config import AuditSection, Config
from coordinator.rules.capacity import OVERLAP, VISIBLE, AdmissionRule, PoolLoad
from coordinator.rules.fleet_choice import FleetRules
from coordinator.rules.topology import NodeLinks, fluid_bound_s
from protocol.limits import HOUR_S

BYTES_PER_MBIT = 1e6 / 8

Admission = Literal["visible", "overlap", "buffer"]


@dataclass(frozen=True)
class Links:
    """The links that transfer a version; without a size, the time is drawn around `Scenario.broadcast_s`."""

    size_mb: float = 0.0
    """Size of a published version, in MB."""
    source_mbit: float = 1000.0
    node_mbit: float = 100.0
    node_up_mbit: float = 20.0
    spread: float = 0.0
    """The sigma of a log-normal distribution, for each direction of each node."""
    load_s: float = 0.0
    """The time from the last byte to the first token."""
    hear_s: float = 0.0
    """The time from publication until nodes begin to fetch."""


@dataclass(frozen=True)
class SimulatedPool:
    """Nodes that differ: each spread is the sigma of a log-normal distribution around the named mean."""

    nodes: int = 100
    group_s: float = 60.0
    """The time in which a node samples one group, when it samples `at_once` groups together."""
    at_once: int = 1
    speed_spread: float = 0.0
    length_spread: float = 0.0
    """The spread of the lengths of groups: with 1, one group in 100 is more than six times as long as the mean."""
    foresight: float = 0.0
    """The part of that spread which depends on the prompt, and so is predictable; the rest is random."""
    price_per_hour: float = 0.35
    price_spread: float = 0.0
    stay_s: float = math.inf
    """The mean time that nodes stay; then they leave without returning their leases."""
    preempt_s: float = math.inf
    """The mean time until a node is preempted: it returns its leases and leaves."""
    away_s: float = HOUR_S
    """The mean time until a similar node joins."""
    liars: float = 0.0
    """The share of nodes that forge: they claim and answer ten times as fast, and every group is wrong."""


@dataclass(frozen=True)
class Scenario:
    """The settings of one run; equal settings give an equal trace."""

    staleness: int = 4
    kappa: int = 0
    """Updates between publications; 0 uses the rule's advice."""
    groups_per_update: int = 128
    updates: int = 100
    train_s: float = 100.0
    train_spread: float = 0.0
    broadcast_s: float = 20.0
    broadcast_spread: float = 0.0
    links: Links = field(default_factory=Links)
    lease_s: float = 600.0
    """The time after which a group without an answer is leased to another node."""
    admission: Admission = "visible"
    """`overlap` is ECHO-2's: no sampling while a version is being sent, no limit otherwise, and a filter by age.
    `buffer` is Echo's: sampling never pauses while there is room."""
    buffered_max: int = 0
    """The limit of leased and waiting groups for `buffer`, in updates; 0: 2 (S + 1)."""
    over_issue: int = 0
    """The most late groups that a second node gets when the learner waits only for them."""
    continues: bool = False
    """True if another node continues the part of a group that a lost node has reported."""
    lookahead: int = 0
    """The number of groups among which a node gets those that suit its speed; 0: the oldest."""
    gamma: float = 0.0
    """The throughput of the fleet as a multiple of the least throughput; with 0 all nodes work."""
    rules: FleetRules = field(default_factory=FleetRules)
    audits: AuditSection = field(default_factory=AuditSection)
    audit_s: float = 60.0
    """The time from an answer to its verdict."""
    learner_price_per_hour: float = 12.24
    seed: int = 0
    pool: SimulatedPool = field(default_factory=SimulatedPool)

    @property
    def rule(self) -> AdmissionRule:
        return OVERLAP if self.admission == "overlap" else VISIBLE

    @property
    def load(self) -> PoolLoad:
        """Return the input of the capacity model for this round, in groups."""
        return PoolLoad(
            staleness=self.staleness,
            rollouts_per_update=self.groups_per_update,
            train_s=self.train_s,
            broadcast_s=self.arrival_s,
            rollout_s=self.pool.group_s,
        )

    @property
    def arrival_s(self) -> float:
        """Return T_bcast for the capacity model: with links, the bound for nodes that are all alike."""
        links = self.links
        if not links.size_mb:
            return self.broadcast_s
        link = NodeLinks("", up=links.node_up_mbit * BYTES_PER_MBIT, down=links.node_mbit * BYTES_PER_MBIT)
        everybody = [link] * self.pool.nodes
        return (
            fluid_bound_s(1e6 * links.size_mb, links.source_mbit * BYTES_PER_MBIT, everybody)
            + links.hear_s
            + links.load_s
        )

    @property
    def interval(self) -> int:
        """Return the κ that is used."""
        return self.kappa or self.rule.kappa(self.load)

    @property
    def room(self) -> int:
        """Return the size of the buffer, in updates."""
        return self.buffered_max or 2 * (self.staleness + 1)


def around(chance: Random, mean: float, spread: float) -> float:
    """Draw from a log-normal distribution with this mean."""
    return mean * math.exp(chance.gauss(0.0, spread) - spread * spread / 2) if spread else mean


def scenario_of(config: Config, pool: SimulatedPool, **more: Any) -> Scenario:
    """Return the scenario of a round's file; if no strangers may join, the pool has only the round's own nodes."""
    own = pool if config.fleet.strangers else replace(pool, nodes=config.fleet.local_nodes)
    fleet = config.fleet
    fixed: dict[str, Any] = {
        "staleness": config.staleness.max_updates,
        "kappa": config.staleness.publish_every,
        "groups_per_update": config.learner.groups_per_update,
        "lease_s": config.leases.lease_s(config.sampling.max_new_tokens),
        "admission": config.staleness.admission,
        "buffered_max": config.staleness.buffer_updates,
        "over_issue": config.leases.over_issue,
        "lookahead": config.leases.lookahead,
        "gamma": fleet.gamma,
        "rules": FleetRules(fleet.window_s, fleet.margin, fleet.dwell_s),
        "audits": config.audit,
        "pool": own,
    }
    return Scenario(**(fixed | more))
