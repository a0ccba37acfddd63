"""Orders of the operator: nodes can be paused, and every order is kept with its reason."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add a column and a table."""
    op.add_column("nodes", sa.Column("paused_ms", sa.BigInteger(), nullable=True))
    op.create_table(
        "orders",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("given_ms", sa.BigInteger(), nullable=False),
        sa.Column("action", sa.String(), nullable=False),
        sa.Column("subject", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("given_by", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("number"),
    )
    op.create_index("ix_orders_subject", "orders", ["subject"])
