"""How fast links are, by the word of those who received: signed receipts in, rates out.

- A sender's uplink is what all receivers of a version say it sent them, over the time the slowest of them took; a
  receiver's downlink is what it says it received, over its own time. The best of the last versions counts.
- Nobody's own claim about its uplink is asked for. Receivers may lie about others: the worst that follows is a plan
  that does not fit, and the nodes' pickers mend that among themselves.
- All functions are effects, `(connection, …) → outcome`.
"""

import sqlalchemy as sa

from coordinator.publish import newest_version
from coordinator.registry import require_node
from coordinator.tables import receipts, uploads
from coordinator.topology import NodeLinks
from protocol import canonical, limits
from protocol.errors import MalformedMessage, WrongAudience
from protocol.ids import NodeId
from protocol.messages import Fetched, Receipt
from protocol.signing import open_envelope

VERSIONS_KEPT = 5
"""Versions whose receipts decide about rates; older ones are forgotten."""

UNKNOWN_BYTES_PER_S = 5e6
"""A node of which nobody has received anything yet, in a round where no rate is known: 40 Mbit/s."""


def take_receipt(connection: sa.Connection, node: NodeId, message: Fetched, *, round_id: str, now_ms: int) -> None:
    """Keep a node's receipt for a version; its first word counts, and a version that is not out has none."""
    require_node(connection, node)
    signed = open_envelope("receipt", message.receipt, max_bytes=limits.SMALL_REQUEST_MAX_BYTES)
    receipt = Receipt.from_value(canonical.decode(signed.payload, max_bytes=limits.SMALL_REQUEST_MAX_BYTES))
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
            received_ms=now_ms,
            envelope=message.receipt,
        )
    )
    sent = {upload.peer_id: upload.size_bytes for upload in receipt.uploads if upload.peer_id != node}
    rows = [
        {"version": receipt.version, "receiver": node, "sender": sender, "size_bytes": size_bytes}
        for sender, size_bytes in sent.items()
    ]
    if rows:
        connection.execute(sa.insert(uploads), rows)
    for table in (receipts, uploads):
        connection.execute(sa.delete(table).where(table.c.version <= newest - VERSIONS_KEPT))


def measured(connection: sa.Connection) -> tuple[dict[str, float], dict[str, float]]:
    """Uplinks and downlinks in bytes per second, of everybody that a receipt speaks of."""
    both = sa.join(
        uploads, receipts, (uploads.c.version == receipts.c.version) & (uploads.c.receiver == receipts.c.receiver)
    )

    def best(end: sa.Column[str]) -> dict[str, float]:
        rate = sa.func.sum(uploads.c.size_bytes) / sa.func.max(receipts.c.seconds)
        each = sa.select(end.label("name"), rate.label("rate")).select_from(both).group_by(uploads.c.version, end)
        found = each.subquery()
        highest = sa.select(found.c.name, sa.func.max(found.c.rate).label("rate")).group_by(found.c.name)
        return {row.name: row.rate for row in connection.execute(highest)}

    return best(uploads.c.sender), best(uploads.c.receiver)


def node_links(
    live: dict[NodeId, str], up: dict[str, float], down: dict[str, float], *, source: str
) -> tuple[float, list[NodeLinks]]:
    """The source's uplink and every node's links; what is not measured yet is taken to be as usual."""
    usual_up = _mean([rate for name, rate in up.items() if name != source])
    usual_down = _mean(list(down.values()))
    nodes = [
        # Whom nobody can dial feeds nobody.
        NodeLinks(name, (up.get(name) or usual_up) if address else 0.0, down.get(name) or usual_down, bool(address))
        for name, address in live.items()
    ]
    return up.get(source) or 3 * usual_up, nodes


def _mean(rates: list[float]) -> float:
    return sum(rates) / len(rates) if rates else UNKNOWN_BYTES_PER_S
