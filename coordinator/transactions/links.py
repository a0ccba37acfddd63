"""Links: how fast nodes send and receive, and which can be dialled, from the signed receipts of receivers.

- A sender's uplink is the bytes that all receivers of the last versions report from it, divided by the time that it was
  busy sending. Divided by the whole time it would only be what the plan asked for, and a node once rated slow would be
  idle for ever.
- A receiver's downlink is at least the bytes that it reports, divided by its own time; the best of the last versions
  counts.
- Bytes from a node that the receiver could not dial came over a connection that the other side opened: they measure
  nothing.
- No node reports its own uplink. Receivers may lie about others: the worst result is a plan that does not fit, and the
  nodes' pickers correct that among themselves.
- One lie has little effect: only registered nodes and the seeder count as senders, no receipt counts for more than
  one and a half times the usual time, and a rate of 0 counts as unknown.
- A node that names an address can be dialled, unless most of those that tried report a failure. The last report of each
  counts, until it is `VERSIONS_KEPT` versions old. A node that reached nobody is ignored: its own network may be at
  fault.
- A node wrongly rated unreachable still feeds others, over connections that it opens. With every version the plan makes
  one node try it, so that it counts as reachable as soon as it can be dialled again.
- All functions are effects, `(connection, …) → outcome`. `Punching` is kept in memory.

Hole punching: nodes that nobody can dial may be able to dial each other at the same time.

- A node reports at which address its plan's observers see its listening port. If all report the same, and it is the
  address from which the node called the coordinator, the node is *punchable*: others may dial it there, at the same
  moment as it dials them. If two observers differ, a NAT gives every connection another port.
- So no node can bring a stranger's address into a plan. If the coordinator does not see the callers' addresses (behind
  a proxy), no node is punchable.
- Only one node per IP address is punchable: two of them would have to connect inside their network.
- Punching is measured: both sides report how it went. A node for which most reports are failures is not punchable,
  until these reports are `VERSIONS_KEPT` versions old. Each node has one report about another: a node that fails with
  everybody makes no other node unpunchable.
- The reports are those of nodes that are alive: after a restart of the coordinator nodes send them again with their
  next request for a plan.
"""

import ipaddress
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import sqlalchemy as sa

from coordinator.rules.topology import NodeLinks
from coordinator.store.facts import Fact, get_fact, set_fact
from coordinator.store.tables import dials, nodes, receipts, uploads, versions
from coordinator.transactions.policy_versions import newest_version
from coordinator.transactions.registry import require_node
from protocol import limits
from protocol.errors import ConfigInvalid, MalformedMessage, WrongAudience
from protocol.ids import NodeId
from protocol.people.addresses import host_and_port, ip_of
from protocol.wire import canonical
from protocol.wire.signing import open_envelope
from protocol.work.messages import Fetched, PlanRequest, TransferReceipt

VERSIONS_KEPT = 5
"""Versions whose receipts decide about rates; older receipts are deleted."""

UPLOAD_MAX_VERSIONS = 2
"""The most that a receiver can have from one node, in sizes of a version: its files, or an anchor and patches, which
are less than twice as much. Bytes beyond that in a receipt are ignored."""

BUSY_MIN_SHARE = 0.1
"""The least busy time that counts, as a share of the usual time: a shorter one does not show the rate."""

TIMES_USUAL_MAX = 1.5
"""The most weight of a slower receiver's receipt, in usual times; its rate counts as reported."""

DOWN_HEADROOM = 1.5
"""The factor from the rate at which a node received to its downlink: it could have received more."""

UNKNOWN_BYTES_PER_S = 5e6
"""The rate of a node in a round where no rate is known: 40 Mbit/s."""

SEEDER = Fact("seeder", "")
"""The fact of the seeder's peer id: processes that do not lead record receipts, too."""


@dataclass(frozen=True)
class MeasuredLinks:
    """The links that the receipts of the last versions show; rates are in bytes per second."""

    up: dict[str, float] = field(default_factory=dict)
    down: dict[str, float] = field(default_factory=dict)
    unreachable: frozenset[str] = frozenset()
    """Nodes that most of the nodes that tried could not dial."""
    selfish: frozenset[str] = frozenset()
    """Nodes that pass nothing on, as they report."""
    dialled: dict[str, bool] = field(default_factory=dict)
    """True if most of the nodes that tried could dial a node; nodes that nobody tried are left out."""


def take_receipt(connection: sa.Connection, node: NodeId, message: Fetched, *, round_id: str, now_ms: int) -> None:
    """Record a node's receipt for a version; its first receipt counts, and a version must be published to have one."""
    require_node(connection, node)
    signed = open_envelope("receipt", message.receipt, max_bytes=limits.SMALL_REQUEST_MAX_BYTES)
    receipt = TransferReceipt.from_value(canonical.decode(signed.payload, max_bytes=limits.SMALL_REQUEST_MAX_BYTES))
    if signed.signer != node or receipt.round_id != round_id:
        raise WrongAudience("The receipt is somebody else's, or for another round.")
    newest, _ = newest_version(connection)
    if not newest - VERSIONS_KEPT < receipt.version <= newest:
        raise MalformedMessage(f"There is no receipt to give for version {receipt.version}; the newest is {newest}.")
    known = (receipts.c.version == receipt.version) & (receipts.c.receiver == node)
    if connection.execute(sa.select(receipts.c.version).where(known)).first():
        return
    connection.execute(
        sa.insert(receipts).values(
            version=receipt.version,
            receiver=node,
            seconds=receipt.seconds,
            from_origins=receipt.from_origins,
            received_ms=now_ms,
            envelope=message.receipt,
        )
    )
    its_size = sa.select(versions.c.size_bytes).where(versions.c.version == receipt.version)
    believable_bytes = UPLOAD_MAX_VERSIONS * connection.execute(its_size).scalar_one()
    senders = _who_can_send(connection, [said.peer_id for said in receipt.uploads]) - {node}
    sent = {said.peer_id: min(said.size_bytes, believable_bytes) for said in receipt.uploads if said.peer_id in senders}
    busy_s = {upload.peer_id: min(upload.busy_s, receipt.seconds) for upload in receipt.uploads}
    rows = [
        {
            "version": receipt.version,
            "receiver": node,
            "sender": sender,
            "size_bytes": size_bytes,
            "busy_s": busy_s[sender],
            "hindered": sender in receipt.unanswered,
        }
        for sender, size_bytes in sent.items()
    ]
    if rows:
        connection.execute(sa.insert(uploads), rows)
    _add_to_totals(connection, sent)
    if receipt.answered:
        _take_dials(connection, node, receipt)
    for table in (receipts, uploads, dials):
        connection.execute(sa.delete(table).where(table.c.version <= newest - VERSIONS_KEPT))


def know_seeder(connection: sa.Connection, seeder: str) -> None:
    """Record the peer id of the seeder."""
    if get_fact(connection, SEEDER) != seeder:
        set_fact(connection, SEEDER, seeder)


def _who_can_send(connection: sa.Connection, named: list[str]) -> set[str]:
    """Return the nodes and the seeder among `named`: an invented sender would change the usual rates."""
    known = sa.select(nodes.c.node_id).where(nodes.c.node_id.in_(named))
    return {*connection.scalars(known), get_fact(connection, SEEDER)}


def _add_to_totals(connection: sa.Connection, sent: dict[str, int]) -> None:
    """Add to each sender's upload total of the round, which outlives its receipts; the seeder has no total."""
    for sender, size_bytes in sent.items():
        connection.execute(
            sa.update(nodes).where(nodes.c.node_id == sender).values(uploaded_bytes=nodes.c.uploaded_bytes + size_bytes)
        )


def _take_dials(connection: sa.Connection, node: NodeId, receipt: TransferReceipt) -> None:
    """Record which nodes a node could dial, in place of its earlier reports about them."""
    in_vain = (*receipt.unanswered, *filter(None, [receipt.missed_probe]))
    answered = dict.fromkeys(in_vain, False) | dict.fromkeys(receipt.answered, True)
    answered.pop(node, None)
    connection.execute(sa.delete(dials).where(dials.c.receiver == node, dials.c.node.in_(answered)))
    rows = [
        {"receiver": node, "node": other, "version": receipt.version, "answered": yes}
        for other, yes in answered.items()
    ]
    if rows:
        connection.execute(sa.insert(dials), rows)


def measured(connection: sa.Connection, *, rates: bool = True) -> MeasuredLinks:
    """Return the links of all nodes in receipts; without `rates`, only the nodes that can be dialled."""
    up, down = _rates(connection) if rates else ({}, {})
    said_yes = sa.func.sum(sa.cast(dials.c.answered, sa.Integer))
    tried = sa.select(dials.c.node, 2 * said_yes >= sa.func.count()).group_by(dials.c.node)
    dialled = {node: bool(could) for node, could in connection.execute(tried)}
    unreachable = frozenset(node for node, could in dialled.items() if not could)
    selfish = sa.select(nodes.c.node_id).where(nodes.c.shares.is_(False))
    return MeasuredLinks(up, down, unreachable, frozenset(connection.scalars(selfish)), dialled=dialled)


def _rates(connection: sa.Connection) -> tuple[dict[str, float], dict[str, float]]:
    """Return the uplinks and the downlinks, in bytes per second."""
    usual_s = _usual_s(connection)
    if not usual_s:
        return {}, {}
    both = sa.join(
        uploads, receipts, (uploads.c.version == receipts.c.version) & (uploads.c.receiver == receipts.c.receiver)
    )
    longest_s = sa.case({version: TIMES_USUAL_MAX * s for version, s in usual_s.items()}, value=receipts.c.version)
    counts = sa.case((receipts.c.seconds > longest_s, longest_s / receipts.c.seconds), else_=1.0)
    busy_s = uploads.c.busy_s * counts
    sent: dict[str, float] = defaultdict(float)
    sending_s: dict[str, float] = defaultdict(float)
    by_sender = (
        sa.select(
            uploads.c.version,
            uploads.c.sender,
            sa.func.sum(uploads.c.size_bytes * counts),
            sa.func.max(receipts.c.seconds * counts),
            sa.func.sum(busy_s),
            sa.func.max(busy_s),
        )
        .select_from(both)
        .where(uploads.c.hindered.is_(False))
        .group_by(uploads.c.version, uploads.c.sender)
    )
    for version, sender, size_bytes, *times_s in connection.execute(by_sender):
        sent[sender] += size_bytes
        sending_s[sender] += max(_sending_s(*times_s), BUSY_MIN_SHARE * usual_s[version])
    rate = sa.func.sum(uploads.c.size_bytes) / sa.func.max(receipts.c.seconds)
    got = sa.select(uploads.c.receiver, rate.label("rate")).select_from(both)
    each = got.group_by(uploads.c.version, uploads.c.receiver).subquery()
    best = sa.select(each.c.receiver, sa.func.max(each.c.rate)).group_by(each.c.receiver)
    down = {receiver: DOWN_HEADROOM * rate for receiver, rate in connection.execute(best)}
    return {sender: size_bytes / sending_s[sender] for sender, size_bytes in sent.items()}, down


def _usual_s(connection: sa.Connection) -> dict[int, float]:
    """Return the usual seconds of each of the last versions: its median, and at most the median of all receipts.

    Without the second limit, the first receipt of a version would decide alone.
    """
    said: dict[int, list[float]] = defaultdict(list)
    for version, seconds in connection.execute(sa.select(receipts.c.version, receipts.c.seconds)):
        said[version].append(seconds)
    if not said:
        return {}
    of_all = statistics.median(seconds for times in said.values() for seconds in times)
    return {version: min(of_all, statistics.median(seconds)) for version, seconds in said.items()}


def _sending_s(whole_s: float, busy_s: float, longest_s: float) -> float:
    """Return how long a sender was busy with a version, from the times that its receivers were receiving.

    Many receivers at a time show that their chunks come slowly, not that the link is full: a link that all share
    equally, and that is busy for a share ρ of the time, feeds ρ / (1 − ρ) at once on average; here, busy_s / whole_s.
    """
    return max(whole_s * busy_s / (whole_s + busy_s), longest_s)


def node_links(
    live: dict[NodeId, str], known: MeasuredLinks, *, source: str, source_best: float = 0.0
) -> tuple[float, list[NodeLinks]]:
    """Return the source's uplink and every node's links; unmeasured links get the usual rate.

    The source is the coordinator's own, so its own report counts, too: `source_best` is its rate in its best second.
    """
    usual_up = _usual([rate for name, rate in known.up.items() if name != source])
    usual_down = _usual(list(known.down.values()))
    links = [
        NodeLinks(
            name,
            up=0.0 if name in known.selfish else known.up.get(name) or usual_up,
            down=known.down.get(name) or usual_down,
            dialable=bool(address) and name not in known.unreachable,
        )
        for name, address in live.items()
    ]
    return max(known.up.get(source) or 3 * usual_up, source_best), links


def _usual(rates: list[float]) -> float:
    """Return the median of the rates above 0: one lie does not change it much."""
    return statistics.median(filter(None, rates)) if any(rates) else UNKNOWN_BYTES_PER_S


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
