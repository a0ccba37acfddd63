"""How fast links are and who can be dialled, by the word of those who received: signed receipts in, links out.

- A sender's uplink is what all receivers of the last versions say it sent them, over the time that it was busy sending.
  Over the whole time it would only be what the plan asked for, and a node once held for slow would be idle for ever.
- A receiver's downlink is at least what it says it received, over its own time; the best of the last versions counts.
- What came from a node that the receiver could not dial came by chance, over another's connection: it measures nothing.
- Nobody's own claim about its uplink is asked for. Receivers may lie about others: the worst that follows is a plan
  that does not fit, and the nodes' pickers mend that among themselves.
- One lie does not go far: only registered nodes and the seeder are taken for senders, no receipt counts for more than
  one and a half times the usual time, and rates of nothing are none.
- A node that names an address can be dialled, unless more of those who tried say no than yes. The last word of each
  counts, until it is `VERSIONS_KEPT` versions old. Who reached nobody has no say: its own network may be at fault.
- A node wrongly called unreachable feeds others all the same, over connections that it opens; and the plan has somebody
  try it with every version, so that it is noticed when it can be dialled again.
- All functions are effects, `(connection, …) → outcome`.
"""

import statistics
from collections import defaultdict
from dataclasses import dataclass, field

import sqlalchemy as sa

from coordinator.rules.topology import NodeLinks
from coordinator.store.state import get_fact, set_fact
from coordinator.store.tables import dials, nodes, receipts, uploads, versions
from coordinator.transactions.policy_versions import newest_version
from coordinator.transactions.registry import require_node
from protocol import limits
from protocol.errors import MalformedMessage, WrongAudience
from protocol.ids import NodeId
from protocol.wire import canonical
from protocol.wire.signing import open_envelope
from protocol.work.messages import Fetched, TransferReceipt

VERSIONS_KEPT = 5
"""Versions whose receipts decide about rates; older ones are forgotten."""

UPLOAD_MAX_VERSIONS = 2
"""What a receiver can have had from one node, in versions: its files, or an anchor and patches that are less than twice
as much. What a receipt claims beyond counts for nothing."""

BUSY_MIN_SHARE = 0.1
"""Of the usual time, at the least: from less than that nothing can be told about the rest."""

TIMES_USUAL_MAX = 1.5
"""Who was slower is believed at its own rate, but has no more weight than that."""

DOWN_HEADROOM = 1.5
"""What a node received is not all that it could have."""

UNKNOWN_BYTES_PER_S = 5e6
"""A node of which nobody has received anything yet, in a round where no rate is known: 40 Mbit/s."""

SEEDER = "seeder"
"""The fact of the seeder's peer id: processes that do not lead take receipts, too."""


@dataclass(frozen=True)
class MeasuredLinks:
    """What the receipts of the last versions say; rates in bytes per second."""

    up: dict[str, float] = field(default_factory=dict)
    down: dict[str, float] = field(default_factory=dict)
    unreachable: frozenset[str] = frozenset()
    """Nodes that most of those who tried could not dial."""
    selfish: frozenset[str] = frozenset()
    """Nodes that pass nothing on, by their own word."""
    dialled: dict[str, bool] = field(default_factory=dict)
    """Whether most of those who tried could dial a node, where anybody tried."""


def take_receipt(connection: sa.Connection, node: NodeId, message: Fetched, *, round_id: str, now_ms: int) -> None:
    """Keep a node's receipt for a version; its first word counts, and a version that is not out has none."""
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
    """Note whose uploads are the seeder's."""
    if get_fact(connection, SEEDER) != seeder:
        set_fact(connection, SEEDER, seeder)


def _who_can_send(connection: sa.Connection, named: list[str]) -> set[str]:
    """Of those named the nodes, and the seeder: who is made up would have a say in what is usual."""
    known = sa.select(nodes.c.node_id).where(nodes.c.node_id.in_(named))
    return {*connection.scalars(known), get_fact(connection, SEEDER)}


def _add_to_totals(connection: sa.Connection, sent: dict[str, int]) -> None:
    """Add to what each sender has uploaded in this round, which outlives its receipts; the seeder has no total."""
    for sender, size_bytes in sent.items():
        connection.execute(
            sa.update(nodes).where(nodes.c.node_id == sender).values(uploaded_bytes=nodes.c.uploaded_bytes + size_bytes)
        )


def _take_dials(connection: sa.Connection, node: NodeId, receipt: TransferReceipt) -> None:
    """Keep whom a node could dial, in place of what it said of them before."""
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
    """The links of everybody that a receipt speaks of; without `rates`, only who can be dialled, for a plan in hand."""
    up, down = _rates(connection) if rates else ({}, {})
    said_yes = sa.func.sum(sa.cast(dials.c.answered, sa.Integer))
    tried = sa.select(dials.c.node, 2 * said_yes >= sa.func.count()).group_by(dials.c.node)
    dialled = {node: bool(could) for node, could in connection.execute(tried)}
    unreachable = frozenset(node for node, could in dialled.items() if not could)
    selfish = sa.select(nodes.c.node_id).where(nodes.c.shares.is_(False))
    return MeasuredLinks(up, down, unreachable, frozenset(connection.scalars(selfish)), dialled=dialled)


def _rates(connection: sa.Connection) -> tuple[dict[str, float], dict[str, float]]:
    """Uplinks and downlinks."""
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
    """How long each of the last versions took most nodes: the median, and no more than that of all receipts.

    Else whoever is the first to tell of a version would say alone what is usual.
    """
    said: dict[int, list[float]] = defaultdict(list)
    for version, seconds in connection.execute(sa.select(receipts.c.version, receipts.c.seconds)):
        said[version].append(seconds)
    if not said:
        return {}
    of_all = statistics.median(seconds for one in said.values() for seconds in one)
    return {version: min(of_all, statistics.median(seconds)) for version, seconds in said.items()}


def _sending_s(whole_s: float, busy_s: float, longest_s: float) -> float:
    """How long a sender was busy with a version, from how long each of its receivers was receiving.

    Many receivers at a time say that their chunks come slowly, not that the link is full: one that all share equally,
    and that is busy for a share ρ of the time, feeds ρ / (1 − ρ) at once on average; here these are busy_s / whole_s.
    """
    return max(whole_s * busy_s / (whole_s + busy_s), longest_s)


def node_links(
    live: dict[NodeId, str], known: MeasuredLinks, *, source: str, source_best: float = 0.0
) -> tuple[float, list[NodeLinks]]:
    """The source's uplink and every node's links; what is not measured yet is taken to be as usual.

    The source is the coordinator's own, so its word counts, too: `source_best` is what it has sent in its best second.
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
    """The median of those above 0: one lie does not move it far."""
    return statistics.median(filter(None, rates)) if any(rates) else UNKNOWN_BYTES_PER_S
