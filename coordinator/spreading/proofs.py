"""Which nodes have proven lately that they really transfer chunks: only these feed others in a plan.

- Keys are free. A key that registers and sends heartbeats has shown nothing, so it is a leaf: it feeds nobody, no slot is
  reserved for it, and it has no share in `help_rate`. A leaf that really fetches costs what it takes; one that does not
  costs nothing.
- A node proves itself by what others say of it. The seeder, which is the operator's, reports to whom it delivered chunks.
  A receipt of a proven node proves the peers that it names as senders. So every proof begins at the seeder, or at a node
  whose owner has a validated group: free keys that vouch for one another prove nothing.
- A proven node renews its proof by its own receipts, for `VERSIONS_KEPT` versions each: one deep in a tree feeds nobody
  and is fed by peers, and nobody else speaks of it.
- A node that was planned as a parent and gave nothing to any of its children, though one of them has completed the version,
  is idle: it is a leaf for `VERSIONS_KEPT` versions, or until a proven node names it as a sender.
- The first version of a round, and the first after a restart, may find nobody proven: it is planned by guesses, with
  everybody. Nodes turn to the seeder at once for what a parent that never delivered should bring (`swarm_node.picker`).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set

import sqlalchemy as sa

from coordinator.people.standings import IS_KNOWN
from coordinator.spreading.links import VERSIONS_KEPT
from coordinator.store.tables import nodes, receipts, uploads


class Proofs:
    """The version of each node's newest proof; in memory, on the thread that makes plans."""

    def __init__(self) -> None:
        self._proven: dict[str, int] = {}
        self._idle: dict[str, int] = {}
        """Parents that gave nothing, and since which version."""
        self._served: dict[str, None] = {}
        """To whom the seeder delivered since the last plan; filled by another thread."""

    def served(self, names: Iterable[str]) -> None:
        """Record to whom the seeder delivered chunks."""
        for name in names:
            self._served[name] = None

    def proven(
        self, connection: sa.Connection, version: int, fed: Mapping[str, Iterable[str]], planned_version: int
    ) -> frozenset[str]:
        """Return who may feed others in the plan of a version; `fed` has the children of each parent in the last plan."""
        for name in list(self._served):
            del self._served[name]
            self._renew(name, version)
        reported = _receipts(connection)
        credible = self._proven.keys() | _known(connection, set(self._proven) | {name for _, name in reported})
        named = self._follow(reported, credible, version)
        self._find_idle(fed, planned_version, reported, named)
        oldest = version - VERSIONS_KEPT
        self._proven = {name: newest for name, newest in self._proven.items() if newest > oldest}
        self._idle = {name: since for name, since in self._idle.items() if since > oldest}
        return frozenset(self._proven.keys() - self._idle.keys())

    def _follow(self, reported: Mapping[tuple[int, str], Set[str]], credible: Set[str], version: int) -> dict[str, int]:
        """Follow receipts from credible nodes to their senders, and on; return the newest version that names each."""
        named: dict[str, int] = {}
        to_read, read = list(credible), set(credible)
        of_receiver: dict[str, list[tuple[int, Set[str]]]] = defaultdict(list)
        for (reported_version, receiver), senders in reported.items():
            of_receiver[receiver].append((reported_version, senders))
        while to_read:
            receiver = to_read.pop()
            for reported_version, senders in of_receiver[receiver]:
                self._renew(receiver, reported_version)
                for sender in senders - {receiver}:
                    self._renew(sender, reported_version)
                    named[sender] = max(named.get(sender, 0), reported_version)
                    if sender not in read:
                        read.add(sender)
                        to_read.append(sender)
        return named

    def _renew(self, name: str, version: int) -> None:
        self._proven[name] = max(self._proven.get(name, 0), version)

    def _find_idle(
        self,
        fed: Mapping[str, Iterable[str]],
        version: int,
        reported: Mapping[tuple[int, str], Set[str]],
        named: Mapping[str, int],
    ) -> None:
        """Find parents whose children have the version, and have nothing of it from them."""
        for parent, children in fed.items():
            complete = [reported[version, child] for child in children if (version, child) in reported]
            if complete and not any(parent in senders for senders in complete):
                self._idle[parent] = version
        for name in [name for name, since in self._idle.items() if named.get(name, 0) > since]:
            del self._idle[name]


def _receipts(connection: sa.Connection) -> dict[tuple[int, str], set[str]]:
    """Return the senders that each receipt of the last versions names, by version and receiver."""
    rows = connection.execute(
        sa.select(receipts.c.version, receipts.c.receiver, uploads.c.sender).outerjoin_from(
            receipts,
            uploads,
            (uploads.c.version == receipts.c.version) & (uploads.c.receiver == receipts.c.receiver),
        )
    )
    found: dict[tuple[int, str], set[str]] = defaultdict(set)
    for version, receiver, sender in rows:
        found[version, receiver] |= {sender} - {None}
    return dict(found)


def _known(connection: sa.Connection, names: Set[str]) -> set[str]:
    """Return those of these nodes whose owners have a validated group."""
    query = sa.select(nodes.c.node_id).where(IS_KNOWN)
    return names & set(connection.scalars(query)) if names else set()
