"""The plan of the newest version, as nodes ask for their parts of it.

- Planned once per version, from the nodes that are alive then and their measured links; whoever comes later is fitted
  in, and who has fallen silent is left out, without moving anybody else.
- Lives in memory, on the thread that answers these questions: after a restart the next one plans anew.
"""

from coordinator import topology
from coordinator.topology import SOURCE, NodeLinks, Topology
from protocol.errors import UnknownNode
from protocol.ids import NodeId
from protocol.messages import Peer, Plan

PLANNED_FOR_MS = 10_000
"""How long the set of live nodes is taken as known, so that a crowd of questions costs one look."""


class Plans:
    """Who feeds whom, for one version at a time."""

    def __init__(self) -> None:
        self._version = 0
        self._topology: Topology | None = None
        self._addresses: dict[NodeId, str] = {}
        self._looked_ms = 0

    def is_stale(self, version: int, node: NodeId, now_ms: int) -> bool:
        """Whether the live nodes must be looked up before `part` can answer."""
        planned = self._version == version and node in self._addresses
        return not planned or now_ms >= self._looked_ms + PLANNED_FOR_MS

    def update(
        self, version: int, live: dict[NodeId, str], source_up: float, nodes: list[NodeLinks], now_ms: int
    ) -> None:
        """Take note of who is alive: plan a new version, or fit changes into the plan there is."""
        self._addresses, self._looked_ms = live, now_ms
        if self._topology is None or self._version != version:
            self._version, self._topology = version, topology.plan(source_up, nodes)
            return
        for gone in self._topology.parents.keys() - live.keys():
            topology.leave(self._topology, gone)
        for node in nodes:
            if node.name not in self._topology.parents:
                topology.join(self._topology, node)

    def part(self, node: NodeId, seeder: Peer | None) -> Plan:
        """From whom this node fetches which stripe."""
        if self._topology is None or node not in self._topology.parents:
            raise UnknownNode("This node is not part of the plan.", hint="Register, and ask again.")
        peers = []
        for name, stripes in self._topology.upstreams(node).items():
            if name == SOURCE:
                if seeder is not None:
                    peers.append(seeder.model_copy(update={"stripes": tuple(stripes)}))
            elif address := self._addresses.get(NodeId(name)):
                peers.append(Peer(peer_id=name, address=address, kind="peer", stripes=tuple(stripes)))
        return Plan(stripes=self._topology.stripes, peers=tuple(peers))
