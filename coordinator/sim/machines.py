"""The simulated nodes, the groups that they sample, and their leases.

Audits of simulated claims use the real trust rules.

The time at which a version is complete on each node, with the trees of the real planner and fluid links.

- A node receives at the common rate of the planned trees, or at its own downlink if that is slower. At every hop except
  the first, a chunk must be complete before it is sent on, and it arrives at its stripe's part of that rate: with few
  chunks this takes long.
- Trees are planned for the nodes that are alive at the publication, as in the coordinator; a node that joins later
  receives at the rate of the trees, from nodes that hold the version.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from coordinator.config import AuditSection
from coordinator.rules import trust
from coordinator.rules.fleet_choice import GroupRecord
from coordinator.rules.lease_allowance import MEASURED_MAX
from coordinator.rules.topology import SOURCE, NodeLinks, Topology, plan
from coordinator.rules.trust import OwnerStanding
from coordinator.sim.scenario import BYTES_PER_MBIT, Links, Scenario, around
from ledger.drawing import ALL_PPM
from protocol.limits import HOUR_S
from protocol.policy.chunks import fitting_size
from protocol.work.lease import OPEN, TRANSITIONS, LeaseEvent, LeaseState


def draw_links(chance: Random, name: str, links: Links) -> NodeLinks:
    """Draw the links of one node."""
    down = around(chance, links.node_mbit, links.spread) * BYTES_PER_MBIT
    up = around(chance, links.node_up_mbit, links.spread) * BYTES_PER_MBIT
    return NodeLinks(name, up=up, down=down)


class SimulatedSpread:
    """The distribution of versions to nodes."""

    def __init__(self, links: Links) -> None:
        self._size_bytes = 1e6 * links.size_mb
        self._chunk_bytes = fitting_size(round(self._size_bytes))
        self._links = links
        self._rate = 0.0
        self._stripes = 1
        self._hops: Mapping[str, int] = {}

    def publish(self, nodes: Sequence[NodeLinks]) -> None:
        """Plan the trees of a new version."""
        topology = plan(self._links.source_mbit * BYTES_PER_MBIT, nodes)
        self._rate, self._stripes, self._hops = topology.rate, topology.stripes, depths(topology)

    def delay_s(self, node: NodeLinks) -> float:
        """Return the time from publication, or from a newcomer's arrival, until the version is complete."""
        rate = min(self._rate or node.down, node.down)
        hops = self._hops.get(node.name, 1)
        return self._links.hear_s + (self._size_bytes + (hops - 1) * self._stripes * self._chunk_bytes) / rate


def depths(topology: Topology) -> dict[str, int]:
    """Return each node's distance from the source, in hops, in the stripe in which it is largest."""
    deepest = dict.fromkeys(topology.parents, 1)
    for stripe in range(topology.stripes):
        depth = {SOURCE: 0}
        for name in topology.parents:
            path = []
            while name not in depth:
                path.append(name)
                name = topology.parents[name][stripe]
            for number, passed in enumerate(reversed(path), start=depth[name] + 1):
                depth[passed] = number
                deepest[passed] = max(deepest[passed], number)
    return deepest


NOTHING = -1
"""The update of a node without a version."""

BOAST = 10.0
"""The factor by which a forger answers faster, and claims to be faster, than it is."""


@dataclass(eq=False, slots=True)
class SimulatedGroup:
    """A group of one prompt; `length` is the mean length of its samples as a multiple of the overall mean."""

    number: int
    prompt: float
    expected: float
    length: float = 1.0
    done: float = 0.0
    """The part of the samples that a node reported before it lost the group."""
    update: int = NOTHING
    """The update of the policy that sampled that part."""
    out: "list[SimulatedLease]" = field(default_factory=list)
    """Open leases."""


@dataclass(eq=False, slots=True)
class SimulatedLease:
    """A lease of a group."""

    group: SimulatedGroup
    node: "SimulatedNode"
    update: int
    begun_s: float
    took_s: float
    """The time that the node needs for the rest of the group."""
    life: int
    start: float = 0.0
    """The part that was done before."""
    state: LeaseState = LeaseState.OFFERED

    @property
    def is_open(self) -> bool:
        return self.state in OPEN

    def move(self, event: LeaseEvent) -> None:
        """Move by the real transition table; an invalid event raises."""
        self.state = TRANSITIONS[self.state, event]


@dataclass(eq=False)
class SimulatedNode:
    """A node that takes a simulated time for its work."""

    name: str
    rate: float
    cost: float
    hands: int
    links: NodeLinks
    lies: bool = False
    alive: bool = False
    working: bool = False
    banned: bool = False
    update: int = NOTHING
    """The update of the version in its engine."""
    fetched: int = NOTHING
    """The update of the newest version that it has completely."""
    fetching: bool = False
    loading: bool = False
    waiting: bool = False
    allowance: int = 1
    out: list[SimulatedLease] = field(default_factory=list)
    life: int = 0
    """The number of times that it has left; events of an earlier life are ignored."""
    done: deque[GroupRecord] = field(default_factory=lambda: deque(maxlen=MEASURED_MAX))
    pace: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MEASURED_MAX))
    """Seconds and lengths of its last accepted groups."""
    standing: OwnerStanding = field(default_factory=OwnerStanding)

    @property
    def free(self) -> int:
        """Return the groups that it would accept: none while its current samples delay a newer version."""
        return 0 if self.fetched > self.update else min(self.hands, max(1, self.allowance)) - len(self.out)

    @property
    def claimed(self) -> float:
        """Return the groups a second that it claims."""
        return self.rate * (BOAST if self.lies else 1.0)


def make_node(number: int, scenario: Scenario, chance: Random) -> SimulatedNode:
    pool = scenario.pool
    name = f"node-{number}"
    return SimulatedNode(
        name=name,
        rate=around(chance, pool.at_once / pool.group_s, pool.speed_spread),
        cost=around(chance, pool.price_per_hour, pool.price_spread) / HOUR_S,
        hands=pool.at_once,
        links=draw_links(chance, name, scenario.links),
        lies=bool(pool.liars) and chance.random() < pool.liars,
        working=not scenario.gamma,
        allowance=pool.at_once,
    )


def make_group(number: int, scenario: Scenario, chance: Random) -> SimulatedGroup:
    """Return a group whose length is partly predictable from its prompt."""
    prompt = around(chance, 1.0, scenario.pool.length_spread * scenario.pool.foresight**0.5)
    return SimulatedGroup(number, prompt, prompt if scenario.pool.foresight else 0.0)


def draw_length(group: SimulatedGroup, scenario: Scenario, chance: Random) -> None:
    """Draw the length of new samples of the group."""
    own = scenario.pool.length_spread * (1 - scenario.pool.foresight) ** 0.5
    group.length, group.done = group.prompt * around(chance, 1.0, own), 0.0


def pace(seen: "deque[tuple[float, float]]") -> float | None:
    """Return the seconds that a group of mean length took lately."""
    lengths = sum(length for _, length in seen)
    return sum(took for took, _ in seen) / lengths if lengths else None


def is_drawn(node: SimulatedNode, audit: AuditSection, chance: Random) -> bool:
    """Return True if this claim of the node is audited."""
    node.standing = replace(node.standing, claims=node.standing.claims + 1)
    return chance.random() * ALL_PPM < trust.rate_ppm(node.standing, audit)


def judge(node: SimulatedNode, audit: AuditSection, *, forged: bool) -> bool:
    """Record a verdict; return True if it bans the node."""
    if node.banned:
        return False
    node.standing = trust.after_verdict(node.standing, "hard" if forged else "pass", audit)
    node.banned = trust.level(node.standing, audit) == "banned"
    return node.banned
