"""Cosignatures of the ledger by witnesses: none were collected before."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Add a table."""
    op.create_table(
        "ledger_cosignatures",
        sa.Column("witness", sa.String(300), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("time_s", sa.BigInteger(), nullable=False),
        sa.Column("note", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("witness"),
    )
