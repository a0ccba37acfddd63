"""The stored record of one audit: its reason, the verdict with its evidence, and what became of the money."""

import json
from typing import Any

import sqlalchemy as sa

from coordinator.store.tables import appeals, audits, epochs, leases, nodes
from ledger.tables import claims_table
from protocol.errors import NotFound

SHORTEST = 6
"""The least characters of an id that name a claim, if no other id begins with them."""


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
