"""The operator's orders about nodes, as effects: pause and resume a node, ban and unban an owner.

- A paused node gets no new work. It may finish the leases that it holds, and is paid for them.
- A ban applies to an owner and all their nodes: leases end, groups leave the buffer, and each claim that no audit found
  right is voided by a ledger entry. An owner who is unbanned is audited in full until they have earned trust again.
- Every order is recorded with its reason in the same transaction. Repeating an order changes nothing.
"""

from typing import Any

import sqlalchemy as sa

from coordinator.reports import history, summary
from coordinator.store.tables import LEFT, nodes, trust
from coordinator.transactions import escrow, orders, standings
from coordinator.transactions.lottery import AuditTerms
from coordinator.transactions.orders import Action
from protocol.errors import NotFound
from protocol.ids import NodeId
from protocol.people import names

SHORTEST = 6
"""The least characters of an id that name a node, if no other id begins or ends with them."""


def find(connection: sa.Connection, text: str) -> NodeId:
    """Return the node that `text` names: by its id, its beginning or end, or its name; else its name without a team.

    Nodes choose their names: an exact id comes first, so that no node can use another's id as its name. The holder of a
    plain name may change, so a name that other nodes have with an id added matches them all, which is an error.
    """
    rows = connection.execute(sa.select(nodes.c.node_id, nodes.c.name)).all()
    node_ids = [row.node_id for row in rows if row.node_id == text]
    if not node_ids:
        node_ids = [
            row.node_id for row in rows if text in (row.name, names.without_id(row.name)) or _is_part(row.node_id, text)
        ]
    if not node_ids:
        node_ids = [row.node_id for row in rows if text and row.name.rpartition("@")[0] == text]
    if len(node_ids) != 1:
        what = "No node is" if not node_ids else f"{len(node_ids)} nodes are"
        raise NotFound(f"{what} called {text[:80]}.", hint="`swarm-coordinator nodes list` shows their ids.")
    return NodeId(node_ids[0])


def find_owner(connection: sa.Connection, text: str) -> str:
    """Return the owner that `text` names: by the owner's id, or by a node as `find` does."""
    known = connection.scalar(sa.select(trust.c.owner).where(trust.c.owner == text))
    return known or standings.owner_of(connection, find(connection, text))


def _is_part(node_id: str, text: str) -> bool:
    return len(text) >= SHORTEST and (node_id.startswith(text) or node_id.endswith(text))


def listed(connection: sa.Connection, *, alive_since_ms: int) -> list[dict[str, Any]]:
    """Return every node as on the leaderboard, with its owner, its liveness, and the orders in force about it."""
    columns = (nodes.c.node_id, nodes.c.owner, nodes.c.paused_ms, nodes.c.revoked_ms)
    banned = sa.select(sa.func.max(trust.c.banned_ms)).where(standings.ANSWERS).scalar_subquery().label("banned_ms")
    rows = connection.execute(sa.select(*columns, banned)).mappings()
    about = {row["node_id"]: dict(row) for row in rows}
    return [
        line | about[line["node_id"]] | {"alive": line["last_seen_ms"] >= alive_since_ms and line["phase"] != LEFT}
        for line in summary.leaderboard(connection)
    ]


def node_report(connection: sa.Connection, text: str, *, alive_since_ms: int) -> dict[str, Any]:
    """Return the report on one node, with its refusals and the orders about it and its owner."""
    node = find(connection, text)
    (line,) = (line for line in listed(connection, alive_since_ms=alive_since_ms) if line["node_id"] == node)
    return {
        **line,
        "refusals": history.refusals(connection, node),
        "orders": orders.about(connection, node, line["owner"]),
    }


def order(
    connection: sa.Connection, action: Action, text: str, reason: str, *, given_by: str, terms: AuditTerms, now_ms: int
) -> dict[str, Any]:
    """Carry out an order; return its subject, and `changed`: False if it changed nothing."""
    node = find(connection, text)
    owner = standings.owner_of(connection, node)
    if action == "unban":  # a node may have been banned before it had an owner
        owner = next(iter(standings.banned_among(connection, [node])), owner)
    subject = owner if action in ("ban", "unban") else node
    match action:
        case "pause":
            changed = _set_pause(connection, node, now_ms)
        case "resume":
            changed = _set_pause(connection, node, None)
        case "ban":
            changed = escrow.ban(connection, owner, terms=terms, now_ms=now_ms)
        case "unban":
            changed = standings.forgive(connection, owner)
        case _:
            raise NotFound(f"Unknown order: {action}.")
    if changed:
        orders.record(connection, action, subject, reason, given_by=given_by, now_ms=now_ms)
    return {"action": action, "node_id": node, "owner": owner, "changed": changed}


def ban_preview(connection: sa.Connection, text: str) -> dict[str, Any]:
    """Return the owner of a node, and what a ban would change now."""
    node = find(connection, text)
    owner = standings.owner_of(connection, node)
    banned = standings.banned_ms(connection, owner) is not None
    return {"node_id": node, "owner": owner, "banned": banned, **escrow.would_ban(connection, owner)}


def _set_pause(connection: sa.Connection, node: NodeId, moment_ms: int | None) -> bool:
    before = nodes.c.paused_ms.is_(None) if moment_ms is not None else nodes.c.paused_ms.is_not(None)
    stmt = sa.update(nodes).where(nodes.c.node_id == node, before)
    return bool(connection.execute(stmt.values(paused_ms=moment_ms)).rowcount)
