"""Appeals, the counts that faults took from owners, and the ban that took a claim: for earlier claims, the last one.

An owner's counts before an old fault are not known: a granted appeal pays the claims and ends the ban.
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

audits = sa.table(
    "audits", *map(sa.column, ("claim_id", "owner", "finding", "fault", "settled", "judged_ms", "ban_ms"))
)
trust = sa.table("trust", sa.column("owner"), sa.column("banned_ms"))
claims = sa.table("ledger_claims", sa.column("claim_id"), sa.column("state"))
faults = sa.table("faults", *map(sa.column, ("claim_id", "owner", "claims", "groups", "judged_ms", "lifted")))


def upgrade() -> None:
    """Add a column and two tables."""
    op.add_column("audits", sa.Column("ban_ms", sa.BigInteger(), nullable=True))
    void = sa.select(claims.c.claim_id).where(claims.c.state == "voided")
    by_ban = audits.c.fault.is_(None) & (audits.c.finding.is_(None) | (audits.c.finding != "hard"))
    banned = sa.select(trust.c.banned_ms).where(trust.c.owner == audits.c.owner).scalar_subquery()
    op.execute(sa.update(audits).where(by_ban, audits.c.claim_id.in_(void)).values(ban_ms=banned))
    op.create_table(
        "faults",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("claim_id", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("claims", sa.BigInteger(), nullable=False),
        sa.Column("groups", sa.BigInteger(), nullable=False),
        sa.Column("judged_ms", sa.BigInteger(), nullable=False),
        sa.Column("lifted", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("claim_id"),
    )
    op.create_index("ix_faults_owner", "faults", ["owner"])
    hard = (
        sa.select(audits.c.claim_id, audits.c.owner, sa.literal(0), sa.literal(0), audits.c.judged_ms, sa.false())
        .where(audits.c.finding == "hard")
        .order_by(audits.c.judged_ms, audits.c.claim_id)
    )
    op.execute(sa.insert(faults).from_select(list(faults.c.keys()), hard))
    op.create_table(
        "appeals",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("claim_id", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("envelope", sa.LargeBinary(), nullable=False),
        sa.Column("made_ms", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("reason_code", sa.String(), nullable=False),
        sa.Column("said", sa.String(), nullable=False),
        sa.Column("ruled_by", sa.String(), nullable=False),
        sa.Column("ruled_ms", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("claim_id"),
    )
    op.create_index("ix_appeals_owner", "appeals", ["owner"])
    op.create_index("ix_appeals_state", "appeals", ["state"])
