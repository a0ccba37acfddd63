"""Nodes that nobody can dial, but that may dial each other at the same time: who they are, and where.

- A node reports at which address its plan's observers see its listening port. If all say the same, and it is the
  address from which the node called the coordinator, it is *punchable*: others may be sent there, at the same moment as
  it is sent to them. Two observers that differ have seen a NAT that gives every connection another port.
- So no node brings a stranger's address into a plan. Where the coordinator does not see who calls (behind a proxy),
  nobody is punchable.
- Behind one address only one node is: two there would have to meet inside.
- Punching is measured: both sides report how it went. A node of which more say that it failed is not punchable, until
  these words are `VERSIONS_KEPT` versions old. One word each: who fails with everybody makes nobody else unpunchable.
- Kept in memory, for the nodes that are alive: after a restart of the coordinator nodes report it all with their next
  request for a plan.
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
    """How punching went, as one side says."""

    worked: bool
    version: int


class Punching:
    """What nodes have reported of their places and of holes."""

    def __init__(self) -> None:
        self._places: dict[NodeId, str] = {}
        self._words: dict[NodeId, dict[NodeId, _Word]] = defaultdict(dict)
        """Node → who says how punching with it went."""

    def report(
        self, node: NodeId, message: PlanRequest, *, caller: str, version: int, pairs: Collection[NodeId]
    ) -> None:
        """Record a node's report; `caller` is the address that it called from, where that is known.

        `pairs` are those with whom it was told to punch for this version: of others it has nothing to say.
        """
        self._places.pop(node, None)
        if place := _place(message.observed, caller):
            self._places[node] = place
        for worked, names in ((True, message.punched), (False, message.unpunched)):
            for name in names:
                if name in pairs:
                    self._words[NodeId(name)][node] = _Word(worked, version)

    def punchable(self, version: int, live: Mapping[NodeId, str], undialable: Iterable[NodeId]) -> dict[NodeId, str]:
        """Of those who cannot be dialled the punchable ones, and where each is."""
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
    """The one address at which a node was seen, if it is the one that it called from."""
    if len(set(observed)) != 1 or not caller:
        return None
    (address,) = set(observed)
    with suppress(ConfigInvalid, ValueError):
        host, port = host_and_port(address)
        seen = ip_of(host)
        if seen == ip_of(caller) and port >= limits.PUNCH_PORT_MIN:
            return f"[{seen}]:{port}" if isinstance(seen, ipaddress.IPv6Address) else f"{seen}:{port}"
    return None
