"""Hole punching: the nodes that nobody can dial, but that can dial each other at the same time, and their addresses.

- A node reports at which address its plan's observers see its listening port. If all report the same, and it is the
  address from which the node called the coordinator, the node is *punchable*: others may dial it there, at the same
  moment as it dials them. If two observers differ, a NAT gives every connection another port.
- So no node can bring a stranger's address into a plan. If the coordinator does not see the callers' addresses (behind
  a proxy), no node is punchable.
- Only one node per IP address is punchable: two of them would have to connect inside their network.
- Punching is measured: both sides report how it went. A node for which most reports are failures is not punchable,
  until these reports are `VERSIONS_KEPT` versions old. Each node has one report about another: a node that fails with
  everybody makes no other node unpunchable.
- The reports are kept in memory, for the nodes that are alive: after a restart of the coordinator nodes send them again
  with their next request for a plan.
"""

import ipaddress
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from coordinator.transactions.links import VERSIONS_KEPT
from protocol import limits
from protocol.errors import ConfigInvalid
from protocol.ids import NodeId
from protocol.people.addresses import host_and_port, ip_of
from protocol.work.messages import PlanRequest


@dataclass(frozen=True)
class _Word:
    """The result of punching, as one side reports it."""

    worked: bool
    version: int


class Punching:
    """The addresses of nodes, and the results of punching, as nodes have reported them."""

    def __init__(self) -> None:
        self._places: dict[NodeId, str] = {}
        self._words: dict[NodeId, dict[NodeId, _Word]] = defaultdict(dict)
        """The reports about punching with a node: node → reporter → report."""

    def report(
        self, node: NodeId, message: PlanRequest, *, caller: str, version: int, pairs: Collection[NodeId]
    ) -> None:
        """Record a node's report; `caller` is the address that it called from, if that is known.

        `pairs` are the nodes that its plan for this version pairs it with; reports about others are ignored.
        """
        self._places.pop(node, None)
        if place := _place(message.observed, caller):
            self._places[node] = place
        for worked, names in ((True, message.punched), (False, message.unpunched)):
            for name in names:
                if name in pairs:
                    self._words[NodeId(name)][node] = _Word(worked, version)

    def punchable(self, version: int, live: Mapping[NodeId, str], undialable: Iterable[NodeId]) -> dict[NodeId, str]:
        """Return the punchable nodes among those that cannot be dialled, each with its address."""
        for known in (self._places, self._words):
            for name in known.keys() - live.keys():
                del known[name]
        at_host: dict[str, NodeId] = {}
        for name in sorted(undialable):
            if name in self._places and self._works(name, version):
                at_host.setdefault(self._places[name].rpartition(":")[0], name)
        return {name: self._places[name] for name in at_host.values()}

    def _works(self, name: NodeId, version: int) -> bool:
        words = [word.worked for word in self._words[name].values() if word.version > version - VERSIONS_KEPT]
        return 2 * sum(words) >= len(words)


def _place(observed: Collection[str], caller: str) -> str | None:
    """Return the only address at which a node was observed, if it called from there; else None."""
    if len(set(observed)) != 1 or not caller:
        return None
    (address,) = set(observed)
    with suppress(ConfigInvalid, ValueError):
        host, port = host_and_port(address)
        seen = ip_of(host)
        if seen == ip_of(caller) and port >= limits.PUNCH_PORT_MIN:
            return f"[{seen}]:{port}" if isinstance(seen, ipaddress.IPv6Address) else f"{seen}:{port}"
    return None
