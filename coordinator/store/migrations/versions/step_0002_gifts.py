"""Gifts to the budget: nobody but the operator had paid in before. An index finds the answers to a query."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the table of gifts, and the index."""
    op.create_table(
        "gifts",
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("given_by", sa.String(), nullable=False),
        sa.Column("salt", sa.String(), nullable=False),
        sa.Column("reference", sa.String(), nullable=False),
        sa.Column("amount_micros", sa.BigInteger(), nullable=False),
        sa.Column("recorded_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("reference"),
    )
    below_zero = sa.text("group_no < 0")
    op.create_index("rollouts_of_query", "rollouts", ["group_no"], sqlite_where=below_zero, postgresql_where=below_zero)
