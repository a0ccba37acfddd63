"""The outcome of a node's leases and the evidence for it, as an effect: the answer to `swarm-node why`.

- A node can read its own leases only; another node's lease gets the same answer as a lease that does not exist.
- Until the epoch of a claim is revealed or the claim has a verdict, the answer does not show if an audit was drawn.
- The answer about one named lease contains all that a replay needs except the weights: the node can repeat the check.
"""

from typing import NamedTuple

import sqlalchemy as sa

from coordinator.rules.trust import Finding
from coordinator.store.rows import read_rows
from coordinator.store.tables import LOST, audits, epochs, leases
from coordinator.transactions import appeals, partial_rollouts, registry
from coordinator.transactions.appeals import AppealStanding
from coordinator.transactions.escrow import FORFEITED, WRONG
from coordinator.transactions.partial_rollouts import SignedWork
from ledger.book import ClaimState
from ledger.tables import claims_table
from protocol import limits
from protocol.errors import OwnerBanned, UnknownLease
from protocol.ids import NodeId
from protocol.work.auditing import Explanation, Explanations, Why
from protocol.work.lease import Lease


class LeaseOutcome(NamedTuple):
    """A lease, with its claim, audit, epoch and credit; None for what there is not."""

    lease_id: str
    state: str
    code: str
    said: str
    offer: bytes
    claim_id: str | None
    why: str | None
    rate_ppm: int | None
    finding: Finding | None
    report: bytes | None
    fault: str | None
    held_as: str | None
    epoch: str | None
    money: str | None


def explain(
    connection: sa.Connection, node: NodeId, message: Why, *, tolerance: str, tolerances: bytes, now_ms: int
) -> Explanations:
    """Return the outcome of the leases that `node` asks about."""
    registry.require_node(connection, node)
    where = leases.c.node_id == node
    if message.about:
        where &= (leases.c.lease_id == message.about) | (audits.c.claim_id == message.about)
    outcomes = (
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
        .where(where)
        .order_by(leases.c.issued_ms.desc(), leases.c.lease_id)
        .limit(limits.EXPLANATIONS_MAX)
    )  # fmt: skip
    rows = read_rows(connection, outcomes, LeaseOutcome)
    if message.about and not rows:
        raise UnknownLease("This node has no such lease or claim.", hint="`swarm-node why` lists the last ones.")
    judged_as = Lease.from_bytes(rows[0].offer).judged_as if message.about else ""
    return Explanations(
        tolerance=judged_as or tolerance,
        tolerances=tolerances if message.about else b"",
        explanations=tuple(
            _explained(
                row,
                partial_rollouts.signed(connection, row.lease_id) if message.about else None,
                appeals.standing_of(connection, row.claim_id or ""),
            )
            for row in rows
        ),
    )


def _explained(row: LeaseOutcome, signed: SignedWork | None, appeal: AppealStanding) -> Explanation:
    """Return the outcome of one lease; `signed` is what the node signed for it, if it asked for this lease."""
    rollout, fragments = signed if signed and row.claim_id else SignedWork()
    code, said = row.code, row.said
    finding: str = row.finding or ""
    may_be_drawn = row.epoch != "over" and row.rate_ppm
    if row.money == ClaimState.VOIDED.value:
        code = WRONG if row.finding == "hard" else FORFEITED if row.fault else OwnerBanned.code
        if code == FORFEITED:
            said = f"It was forfeited for the fault in claim {row.fault}: it was unpaid when that fault was found."
    elif row.money == ClaimState.PENDING.value and row.held_as:
        finding, said = "held", _held(row.held_as)
    elif row.money == ClaimState.PENDING.value and not row.finding and (row.why or may_be_drawn):
        finding = "waiting"
    return Explanation(
        lease_id=row.lease_id,
        claim_id=row.claim_id or "",
        state=row.money or row.state,
        code=code,
        said=said,
        finding=finding,
        appeal=appeal.standing,
        ruling=appeal.ruling,
        report=row.report or b"",
        lease=row.offer if signed else b"",
        rollout=rollout,
        fragments=fragments,
    )


def _held(held_as: str) -> str:
    """Return the text that says what a held claim waits for."""
    if held_as == LOST:
        return (
            "Held and not judged: its version was deleted before its class was calibrated. The claim stays unpaid. "
            "This counts as no fault."
        )
    return (
        f"Held: this round has no tolerances for nodes of class {held_as} on its policy yet, so the claim "
        "is neither paid nor refused. This counts as no fault. You need to do nothing on this node: the claim is "
        f"judged once the operator has calibrated {held_as}. Until then this node may get no more work."
    )
