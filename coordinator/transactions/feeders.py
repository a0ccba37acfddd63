"""Feeders: the nodes that feed others by the plan, since they transferred chunks lately and did not fail as parents.

- Keys are free. A key that only registers and sends heartbeats has proven nothing, so it is a leaf of the plan
  (`topology.join`).
- Proof begins at the seeder, which is the operator's: it reports to which nodes it delivered chunks. A receipt of such
  a node, or of one whose owner has a validated group, proves the senders that it names, and so on from there. Proof
  lasts for `VERSIONS_KEPT` versions, and a node's own receipt renews it.
- A parent is judged by the children that the plan gave it, once they have a version: if most received nothing from
  it, it has failed, and is a leaf for `VERSIONS_KEPT` versions; else it has passed. Nodes with validated work have the
  highest rank, then nodes that passed themselves. The children of the highest rank judge a parent; children of a lower
  rank than the parent do not.
- A node that has neither passed nor done work is on trial. As soon as any node has passed or worked, no more nodes on
  trial are planned at once than such nodes. So of many nodes that fetch and never upload, a few are parents of a
  version, other ones each time, and honest nodes pass after a few versions.
- While no node has proven anything (the first version, or the first after a restart without validated work), all nodes
  are planned. A node asks the seeder at once for the chunks of a parent that never delivered any
  (`swarm_node.picker.picker`).
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Set
from enum import IntEnum

import sqlalchemy as sa

from coordinator.rules.topology import STRIPES, Topology
from coordinator.store.tables import nodes, uploads
from coordinator.transactions.links import VERSIONS_KEPT
from coordinator.transactions.standings import IS_KNOWN
from protocol.ids import NodeId
from protocol.policy.chunks import fitting_size

TRIALS_MIN = 4
"""Nodes on trial in one plan, at the least."""

JUDGED_FROM_CHUNKS = 4
"""Chunks per stripe, at least, before a child judges its parents: of fewer, honest others often send all."""

Receipts = Mapping[str, Mapping[str, int]]
"""The bytes of a version by receiver and sender."""


class Rank(IntEnum):
    """The weight of a node's receipt when its parents are judged."""

    NONE = 0
    PROVEN = 1
    """The node transferred chunks lately."""
    PASSED = 2
    """The node's own children received chunks from it."""
    WORKED = 3
    """A group of its owner was found right."""


class Feeders:
    """The record of each node as a sender, with the newest version that shows it.

    It is kept in memory, on the thread that makes plans; another thread calls `report_served`.
    """

    def __init__(self) -> None:
        self._reported: dict[str, None] = {}
        """The nodes to which the seeder delivered since the last plan."""
        self._proven: dict[str, int] = {}
        self._passed: dict[str, int] = {}
        self._failed: dict[str, int] = {}
        self._tried: dict[str, int] = {}

    def report_served(self, names: Iterable[str]) -> None:
        """Record the nodes to which the seeder delivered chunks."""
        for name in names:
            self._reported[name] = None

    def is_proven(self, name: str) -> bool:
        """Return True if the node can be planned without a delivery from the seeder."""
        return name in self._proven

    def choose(
        self, connection: sa.Connection, live: Collection[NodeId], before: Topology | None, version: int
    ) -> Set[str]:
        """Return the nodes that may feed others in the next plan; `before` is the last plan, for `version`."""
        worked = set(connection.scalars(sa.select(nodes.c.node_id).where(IS_KNOWN))).intersection(live)
        receipts = _receipts(connection, version)
        for name in list(self._reported):
            del self._reported[name]
            self._proven[name] = version
        proven = _follow({*self._proven, *self._passed, *worked}, receipts)
        self._proven |= dict.fromkeys(proven, version)
        if before is not None:
            self._judge(before, version, receipts, worked)
        for known in (self._proven, self._passed, self._failed, self._tried):
            for name in [name for name, shown in known.items() if shown <= version - VERSIONS_KEPT]:
                del known[name]
        trusted = (worked | self._passed.keys()).intersection(live) - self._failed.keys()
        new = self._proven.keys() & set(live) - trusted - self._failed.keys()
        if not trusted and not new:
            return set(live) - self._failed.keys() or set(live)
        return trusted | self._on_trial(new, len(trusted), version)

    def _on_trial(self, new: Set[str], trusted: int, version: int) -> Set[str]:
        """Return the nodes on trial of the next plan; those that waited longest come first."""
        waiting = sorted(new, key=lambda name: (self._tried.get(name, 0), name))
        on_trial = waiting[: max(TRIALS_MIN, trusted)] if trusted else waiting
        self._tried |= dict.fromkeys(on_trial, version)
        return set(on_trial)

    def _judge(self, before: Topology, version: int, receipts: Receipts, worked: Set[str]) -> None:
        """Let the children of the last plan judge their parents."""

        def rank(name: str) -> Rank:
            if name in worked:
                return Rank.WORKED
            if name in self._passed:
                return Rank.PASSED
            return Rank.PROVEN if name in self._proven else Rank.NONE

        ranks = {name: rank(name) for name in before.planned}
        for parent in before.planned:
            voters = [child for child in before.children(parent) if child in ranks and _can_judge(receipts, child)]
            highest = max((ranks[child] for child in voters), default=Rank.NONE)
            if highest < max(Rank.PROVEN, ranks[parent]):
                continue
            votes = [parent in receipts[child] for child in voters if ranks[child] == highest]
            if 2 * sum(votes) >= len(votes):
                self._passed[parent] = version
            else:
                self._failed[parent] = version
                self._passed.pop(parent, None)


def _receipts(connection: sa.Connection, version: int) -> dict[str, dict[str, int]]:
    rows = connection.execute(
        sa.select(uploads.c.receiver, uploads.c.sender, uploads.c.size_bytes).where(uploads.c.version == version)
    )
    receipts: dict[str, dict[str, int]] = defaultdict(dict)
    for receiver, sender, size_bytes in rows:
        receipts[receiver][sender] = size_bytes
    return dict(receipts)


def _follow(begin: Set[str], receipts: Receipts) -> Set[str]:
    """Return those of these nodes that have a receipt, the senders that it names, theirs, and so on."""
    proven = {name for name in begin if name in receipts}
    to_read = list(proven)
    while to_read:
        fresh = receipts.get(to_read.pop(), {}).keys() - proven
        proven |= fresh
        to_read.extend(fresh)
    return proven


def _can_judge(receipts: Receipts, receiver: str) -> bool:
    """Return True if the receiver got enough bytes that every parent had the time to send some of them."""
    size_bytes = sum(receipts.get(receiver, {}).values())
    return size_bytes > 0 and size_bytes >= JUDGED_FROM_CHUNKS * STRIPES * fitting_size(size_bytes)
