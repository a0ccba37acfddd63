"""Statements and appeals become entries with the first payment that they concern: all earlier ones are entries."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"

nodes = sa.table("nodes", sa.column("node_id", sa.String()), sa.column("earned", sa.Boolean()))
claims = sa.table("ledger_claims", sa.column("node_id", sa.String()), sa.column("state", sa.String()))
signed = [sa.table(name, sa.column("sequenced", sa.Boolean())) for name in ("statements", "appeals")]


def upgrade() -> None:
    """Add columns that are not null, and one that only statements without an entry need."""
    op.add_column("nodes", sa.Column("earned", sa.Boolean(), nullable=True))
    op.add_column("statements", sa.Column("node_id", sa.String(), nullable=True))
    for table in signed:
        op.add_column(table.name, sa.Column("sequenced", sa.Boolean(), nullable=True))
        op.execute(sa.update(table).values(sequenced=sa.true()))
    paid = sa.select(claims.c.node_id).where(claims.c.state == "posted")
    op.execute(sa.update(nodes).values(earned=nodes.c.node_id.in_(paid)))
    for name, column in (("nodes", "earned"), ("statements", "sequenced"), ("appeals", "sequenced")):
        with op.batch_alter_table(name) as batch:
            batch.alter_column(column, existing_type=sa.Boolean(), nullable=False)
