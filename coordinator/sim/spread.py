"""The time at which a version is complete on each node, with the trees of the real planner and fluid links.

- A node receives at the common rate of the planned trees, or at its own downlink if that is slower. At every hop except
  the first, a chunk must be complete before it is sent on, and it arrives at its stripe's part of that rate: with few
  chunks this takes long.
- Trees are planned for the nodes that are alive at the publication, as in the coordinator; a node that joins later
  receives at the rate of the trees, from nodes that hold the version.
"""

from collections.abc import Mapping, Sequence
from random import Random

from coordinator.rules.topology import SOURCE, NodeLinks, Topology, plan
from coordinator.sim.scenario import BYTES_PER_MBIT, Links, around
from protocol.policy.chunks import fitting_size


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
