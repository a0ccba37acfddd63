"""The stored records of audits: their reasons, the verdicts with their evidence, and what became of the money."""

import json
from typing import Any

import sqlalchemy as sa

from coordinator.reports.moderation import find
from coordinator.store.tables import appeals, audits, epochs, leases, nodes
from ledger.tables import claims_table
from protocol.errors import NotFound

SHORTEST = 6
"""The least characters of an id that name a claim, if no other id begins with them."""

LISTED_MAX = 1_000
"""The most audits that one list has."""


def recent_audits(connection: sa.Connection, node: str, count: int) -> list[dict[str, Any]]:
    """Return the newest `count` claims that were drawn for an audit; of all nodes if `node` is empty."""
    shown = ("claim_id", "node_id", "version", "epoch", "why", "finding", "held_as", "taken_by", "judged_ms", "settled")
    stmt = (
        sa.select(
            *(audits.c[name] for name in shown), nodes.c.name, leases.c.ended_ms.label("accepted_ms"),
            claims_table.c.amount_micros,
        )
        .outerjoin_from(audits, nodes, nodes.c.node_id == audits.c.node_id)
        .outerjoin(leases, leases.c.lease_id == audits.c.lease_id)
        .outerjoin(claims_table, claims_table.c.claim_id == audits.c.claim_id)
        .where(audits.c.why != "")
        .order_by(leases.c.ended_ms.desc(), audits.c.claim_id)
        .limit(count)
    )  # fmt: skip
    if node:
        stmt = stmt.where(audits.c.node_id == find(connection, node))
    return [dict(row) for row in connection.execute(stmt).mappings()]


def audit_record(connection: sa.Connection, text: str) -> dict[str, Any]:
    """Return the audit of the claim that `text` names: by its id or the beginning of it, or by its lease's id."""
    begins = audits.c.claim_id.startswith(text, autoescape=True) if len(text) >= SHORTEST else sa.false()
    stmt = (
        sa.select(
            audits, nodes.c.name, epochs.c.state.label("epoch_state"), leases.c.ended_ms.label("accepted_ms"),
            claims_table.c.state.label("money"), claims_table.c.amount_micros, claims_table.c.tokens,
        )
        .outerjoin_from(audits, nodes, nodes.c.node_id == audits.c.node_id)
        .outerjoin(epochs, epochs.c.epoch == audits.c.epoch)
        .outerjoin(leases, leases.c.lease_id == audits.c.lease_id)
        .outerjoin(claims_table, claims_table.c.claim_id == audits.c.claim_id)
        .where((audits.c.claim_id == text) | (audits.c.lease_id == text) | begins)
        .limit(2)
    )  # fmt: skip
    rows = connection.execute(stmt).mappings().all()
    if len(rows) != 1:
        what = "No accepted claim has" if not rows else "Several claims have"
        raise NotFound(
            f"{what} the id {text[:80]}.", hint="Give more of the claim's id, or its lease's id from `swarm-node why`."
        )
    row = dict(rows[0])
    numbers = connection.scalars(sa.select(appeals.c.number).where(appeals.c.claim_id == row["claim_id"])).all()
    report = json.loads(row.pop("report") or b"{}")
    return {**row, "report": report, "appeals": list(numbers)}
