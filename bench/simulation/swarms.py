"""The swarms to try: how many nodes, with which links, and what the planner believes of them."""

from collections.abc import Callable, Sequence
from random import Random

from coordinator.rules.topology import NodeLinks

LINK_BYTES_PER_S = 2.5e6

MIXES: dict[str, tuple[Sequence[float], float]] = {"uniform": ((1.0,), 1.0), "mixed": ((0.5, 1.0, 2.0), 2.0)}
"""Uplinks in turns, and the downlink, in units of a link."""

BELIEFS: dict[str, Callable[[NodeLinks, Random], float]] = {
    "true": lambda node, rng: node.up,
    "equal": lambda node, rng: LINK_BYTES_PER_S,
    "wrong": lambda node, rng: node.up * 2 ** rng.uniform(-1, 1),
}
"""The uplink that the planner believes a node to have."""


def swarm(count: int, mix: str) -> list[NodeLinks]:
    """Return `count` nodes with links of one kind."""
    ups, down = MIXES[mix]
    return [
        NodeLinks(f"{number:05d}", ups[number % len(ups)] * LINK_BYTES_PER_S, down * LINK_BYTES_PER_S)
        for number in range(count)
    ]


def believed(nodes: Sequence[NodeLinks], belief: str, seed: int) -> list[NodeLinks]:
    """Return the nodes as the planner sees them."""
    rng = Random(seed)
    return [NodeLinks(node.name, BELIEFS[belief](node, rng), node.down) for node in nodes]
