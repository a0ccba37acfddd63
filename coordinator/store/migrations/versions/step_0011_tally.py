"""Tally: counts for leases are kept in one row, and indexes of leases separate open ones from ended ones."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Add a table, whose row is counted at the first start, and change indexes."""
    op.create_table(
        "tally",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("unfinished", sa.BigInteger(), nullable=False),
        sa.Column("reserved_micros", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    for name in ("leases_open", "leases_held", "leases_by_group", "ix_leases_ended_ms"):
        op.drop_index(name, table_name="leases")
    still, over = sa.text("ended_ms IS NULL"), sa.text("ended_ms IS NOT NULL")
    op.create_index("leases_open", "leases", ["expires_ms"], sqlite_where=still, postgresql_where=still)
    op.create_index("leases_of_group", "leases", ["group_no"], sqlite_where=still, postgresql_where=still)
    op.create_index("leases_over", "leases", ["ended_ms"], sqlite_where=over, postgresql_where=over)
    op.drop_index("ix_rollouts_node_id", table_name="rollouts")
    op.create_index("rollouts_by_node", "rollouts", ["node_id", "state"])
