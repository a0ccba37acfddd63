"""Why: what became of a node's leases, with the evidence, as an effect.

- A node is told of its own leases only; of another's it hears what it would hear of none.
- Until the epoch of a claim is revealed, or a verdict on it is there, drawn or not drawn sounds the same.
- With the one lease that it names comes all that a replay needs beside the weights: the node can run the check itself.
"""

import sqlalchemy as sa

from coordinator.store.tables import LOST, audits, epochs, leases
from coordinator.transactions import appeals, partial_rollouts, registry
from coordinator.transactions.escrow import FORFEITED, WRONG
from ledger.book import ClaimState
from ledger.tables import claims_table
from protocol import limits
from protocol.errors import OwnerBanned, UnknownLease
from protocol.ids import NodeId
from protocol.work.appeal import Standing
from protocol.work.auditing import Explanation, Explanations, Why
from protocol.work.lease import Lease


def explain(
    connection: sa.Connection, node: NodeId, message: Why, *, tolerance: str, tolerances: bytes, now_ms: int
) -> Explanations:
    """What became of the leases that a node asks about."""
    registry.require_node(connection, node)
    here = leases.c.node_id == node
    if message.about:
        here &= (leases.c.lease_id == message.about) | (audits.c.claim_id == message.about)
    rows = connection.execute(
        sa.select(
            leases.c.lease_id, leases.c.state, leases.c.code, leases.c.said, leases.c.offer,
            audits.c.claim_id, audits.c.why, audits.c.rate_ppm, audits.c.finding, audits.c.report, audits.c.fault,
            audits.c.held_as,
            epochs.c.state.label("epoch"),
            claims_table.c.state.label("money"),
        )
        .outerjoin_from(leases, audits, audits.c.lease_id == leases.c.lease_id)
        .outerjoin(epochs, epochs.c.epoch == audits.c.epoch)
        .outerjoin(claims_table, claims_table.c.claim_id == audits.c.claim_id)
        .where(here)
        .order_by(leases.c.issued_ms.desc(), leases.c.lease_id)
        .limit(limits.EXPLANATIONS_MAX)
    ).mappings().all()  # fmt: skip
    if message.about and not rows:
        raise UnknownLease("No such lease or claim is this node's.", hint="`swarm-node why` lists the last ones.")
    judged_as = Lease.from_bytes(rows[0]["offer"]).judged_as if message.about else ""
    return Explanations(
        tolerance=judged_as or tolerance,
        tolerances=tolerances if message.about else b"",
        explanations=tuple(
            _explained(
                row,
                partial_rollouts.signed(connection, row["lease_id"]) if message.about else None,
                appeals.standing_of(connection, row["claim_id"] or ""),
            )
            for row in rows
        ),
    )


def _explained(
    row: sa.RowMapping, signed: tuple[bytes, tuple[bytes, ...]] | None, appeal: tuple[Standing, str]
) -> Explanation:
    """One lease, with what was leased and signed if that is given."""
    rollout, told = signed if signed and row["claim_id"] else (b"", ())
    void = row["money"] == ClaimState.VOIDED.value
    taken = WRONG if row["finding"] == "hard" else FORFEITED if row["fault"] else OwnerBanned.code
    reason = taken if void else ""
    by_fault = f"It went with the fault in claim {row['fault']}, before which it waited unpaid."
    may_wait = row["why"] or (row["epoch"] != "over" and row["rate_ppm"])
    waits = may_wait and not row["finding"] and row["money"] == ClaimState.PENDING.value
    held = _held(row["held_as"]) if row["held_as"] and row["money"] == ClaimState.PENDING.value else ""
    return Explanation(
        lease_id=row["lease_id"],
        claim_id=row["claim_id"] or "",
        state=row["money"] or row["state"],
        code=reason or row["code"],
        said=by_fault if reason == FORFEITED else held or row["said"],
        finding="held" if held else "waiting" if waits else row["finding"] or "",
        appeal=appeal[0],
        ruling=appeal[1],
        report=row["report"] or b"",
        lease=row["offer"] if signed else b"",
        rollout=rollout,
        fragments=told,
    )


def _held(held_as: str) -> str:
    """Say in words what a held claim waits for."""
    if held_as == LOST:
        return (
            "Held, and never judged: its version was deleted before its class was calibrated. The claim stays unpaid. "
            "This counts as no fault."
        )
    return (
        f"Held: this round has not measured yet how far honest nodes of {held_as} stray on its policy, so the claim "
        "can be neither paid nor refused. This counts as no fault. Nothing is to be done on this node: the claim is "
        f"judged once the operator has calibrated {held_as}, and until then this node may get no more work."
    )
