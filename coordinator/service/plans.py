"""The fetch plan of the newest version, from which each node requests its part.

- A plan is built once per version, from the live nodes and their measured links. Nodes that come later are added, and
  offline nodes are removed, without moving any other node. The live nodes are read every few seconds at most, however
  many newcomers ask.
- A version is planned with the nodes that may feed others (`feeders`). All others are leaves outside the plan: they
  receive data, and no node depends on them.
- A node that cannot be dialled gets the nodes to call; its children wait for these calls. With every version, another
  node tries to dial it all the same (`probe`).
- Two nodes that cannot be dialled may feed each other if both are punchable (`punching`): each dials the other at once.
  A node that cannot be dialled gets nodes to ask for its address as they see it (`observers`).
- A plan is in memory, on the thread that answers these requests: after a restart the next request builds a new one.
"""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace

import sqlalchemy as sa

from coordinator.rules import topology
from coordinator.rules.topology import SOURCE, NodeLinks, Topology
from coordinator.transactions.feeders import Feeders
from coordinator.transactions.links import Punching
from protocol import limits
from protocol.errors import UnknownNode
from protocol.ids import NodeId
from protocol.work.messages import FetchPlan, Peer, PlanRequest

PLANNED_FOR_MS = 10_000
"""Time for which the set of live nodes is reused, so that many requests cost one query."""


class Plans:
    """The fetch plan of one version at a time."""

    def __init__(self) -> None:
        self.seeder: Peer | None = None
        """None until it has started."""
        self.seeder_up = 0.0
        """Bytes that the seeder sent in its best recent second."""
        self._version = 0
        self._topology: Topology | None = None
        self._addresses: dict[NodeId, str] = {}
        self._also: Mapping[NodeId, tuple[str, ...]] = {}
        """Further addresses of some nodes."""
        self._dialled: Mapping[str, bool] = {}
        """True for a node if most nodes that tried could dial it."""
        self._probes: dict[str, NodeId] = {}
        self._punching = Punching()
        self.feeders = Feeders()
        self._places: dict[NodeId, str] = {}
        """Addresses of the punchable nodes of this plan."""
        self._looked_ms = 0

    def has(self, version: int) -> bool:
        """Return True if `version` is planned: `update` then needs no rates."""
        return self._version == version and self._topology is not None

    def is_stale(self, version: int, now_ms: int) -> bool:
        """Return True if the live nodes must be read before `part` can answer."""
        return not self.has(version) or now_ms >= self._looked_ms + PLANNED_FOR_MS

    def is_planned(self, node: str, upstream: str) -> bool:
        """Return True if the plan connects `node` to `upstream`, as a parent or as a spare."""
        plan = self._topology
        return plan is not None and node in plan.parents and upstream in plan.upstreams(node)

    def fit_in(self, node: NodeId) -> None:
        """Add a node that arrived after the live nodes were read."""
        if self._topology is not None and node not in self._topology.parents:
            topology.join(self._topology, [NodeLinks(node, 0.0, 0.0, dialable=False)])

    def choose(self, connection: sa.Connection, live: Collection[NodeId]) -> Set[str]:
        """Return the nodes that may feed others in the plan of a new version."""
        return self.feeders.choose(connection, live, self._topology, self._version)

    def report(self, node: NodeId, message: PlanRequest, *, caller: str) -> None:
        """Record a node's report about its network; the plan of the next version uses it."""
        self._punching.report(node, message, caller=caller, version=self._version, pairs=self._pairs(node))

    def update(
        self,
        version: int,
        live: dict[NodeId, str],
        source_up: float,
        nodes: list[NodeLinks],
        now_ms: int,
        *,
        also: Mapping[NodeId, tuple[str, ...]] | None = None,
        dialled: Mapping[str, bool] | None = None,
        feeding: Set[str] | None = None,
    ) -> None:
        """Update the live nodes: plan a new version with the nodes in `feeding` (None: all), or adapt the plan."""
        self._addresses, self._also, self._looked_ms = live, also or {}, now_ms
        self._dialled = dialled or {}
        if self._topology is None or not self.has(version):
            undialable = [NodeId(node.name) for node in nodes if not node.dialable]
            self._places = self._punching.punchable(version, live, undialable)
            nodes = [replace(node, punchable=node.name in self._places) for node in nodes]
            planned = [node for node in nodes if feeding is None or node.name in feeding]
            self._version, self._topology = version, topology.plan(source_up, planned)
            self._join(self._topology, nodes)
            self._probes = _deal_probes(version, live, self._topology)
            return
        topology.leave(self._topology, self._topology.parents.keys() - live.keys())
        self._join(self._topology, nodes)

    def _join(self, plan: Topology, nodes: Sequence[NodeLinks]) -> None:
        newcomers = [node for node in nodes if node.name not in plan.parents]
        topology.join(plan, newcomers, is_proven=self.feeders.is_proven)

    def plan_for(self, node: NodeId) -> FetchPlan:
        """Return the part of a node: its upstreams by stripe, and the nodes that it calls and tries to dial."""
        plan = self._topology
        if plan is None or node not in plan.parents:
            raise UnknownNode(
                "This node is not in the fetch plan.", hint="Register the node, then request the plan again."
            )
        topology.renew_spares(plan, node)
        peers = []
        for name, stripes in plan.upstreams(node).items():
            if name == SOURCE:
                if self.seeder is not None:
                    peers.append(self.seeder.model_copy(update={"stripes": tuple(stripes)}))
            elif name in self._addresses:
                known = self._at_address(name) if name in plan.dialable else None
                peer = known or Peer(peer_id=name, address="", kind="peer")
                peers.append(peer.model_copy(update={"stripes": tuple(stripes)}))
        calls = [] if node in plan.dialable else [name for name in plan.children(node) if name in plan.dialable]
        probe = self._at_address(self._probes.get(node, ""))
        return FetchPlan(
            stripes=plan.stripes,
            peers=tuple(peers),
            rate=plan.rate,
            hops=min(plan.hops(node), limits.HOPS_MAX),
            help_rate=plan.help_rate,
            calls=tuple(filter(None, map(self._at_address, calls))),
            probe=probe,
            dialled=self._dialled.get(node),
            punches=tuple(self._punches(node)),
            observers=() if node in plan.dialable else self._observers(peers, plan.help_rate),
        )

    def _pairs(self, node: NodeId) -> list[NodeId]:
        """Return the nodes with which a node punches: its parents and children, where neither can be dialled."""
        plan = self._topology
        if plan is None or node not in plan.punchable or node not in plan.parents:
            return []
        around = dict.fromkeys([*plan.parents[node], *plan.children(node)])
        return [NodeId(name) for name in around if name in plan.punchable][: limits.PUNCHES_MAX]

    def _punches(self, node: NodeId) -> list[Peer]:
        pairs = [name for name in self._pairs(node) if name in self._addresses]
        return [Peer(peer_id=name, address=self._places[name], kind="peer") for name in pairs]

    def _observers(self, peers: Sequence[Peer], help_rate: float) -> tuple[Peer, ...]:
        """Return the nodes to ask for one's address: those dialled anyway, the seeder first unless in reserve."""
        dialled = [peer for peer in peers if peer.address and (peer.kind == "peer" or peer.stripes or not help_rate)]
        dialled.sort(key=lambda peer: peer.kind != "seeder")
        return tuple(peer.model_copy(update={"stripes": ()}) for peer in dialled[: limits.OBSERVERS_MAX])

    def _at_address(self, name: str) -> Peer | None:
        """Return the address of a node as a peer; None if it is not alive or names no address."""
        address = self._addresses.get(NodeId(name))
        also = self._also.get(NodeId(name), ())
        return Peer(peer_id=name, address=address, also=also, kind="peer") if address else None


def _deal_probes(version: int, live: Mapping[NodeId, str], plan: Topology) -> dict[str, NodeId]:
    """Assign undialable nodes to nodes of the plan that probe them, one each at most, different ones every version."""
    hidden = [name for name, address in live.items() if address and name not in plan.dialable]
    probers = plan.planned
    if not hidden or not probers:
        return {}
    ahead = 1 + version % max(1, len(probers) - 1)
    start = version * len(probers) % len(hidden)
    # Count from a node's own position among the probers, so that no node probes itself.
    places = {name: place for place, name in enumerate(probers)}
    probes = dict[str, NodeId]()
    for place, name in enumerate([*hidden[start:], *hidden[:start]]):
        prober = probers[(places.get(name, place) + ahead) % len(probers)]
        if prober != name:
            probes.setdefault(prober, name)
    return probes
