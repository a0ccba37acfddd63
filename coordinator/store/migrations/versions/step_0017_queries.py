"""Queries: prompts that callers of the endpoint want completed, and the keys of these callers; none were before."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    """Create the tables of API keys and of queries."""
    op.create_table(
        "api_keys",
        sa.Column("number", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("budget_micros", sa.BigInteger(), nullable=False),
        sa.Column("spent_micros", sa.BigInteger(), nullable=False),
        sa.Column("reserved_micros", sa.BigInteger(), nullable=False),
        sa.Column("made_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_ms", sa.BigInteger(), nullable=True),
        sa.Column("revoked_ms", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("name"),
        sa.UniqueConstraint("digest"),
    )
    op.create_table(
        "queries",
        sa.Column("number", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("api_key", sa.Integer(), nullable=False),
        sa.Column("group_no", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=True),
        sa.Column("prompt", sa.LargeBinary(), nullable=False),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.Column("tokens_max", sa.Integer(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=True),
        sa.Column("reserved_micros", sa.BigInteger(), nullable=False),
        sa.Column("asked_ms", sa.BigInteger(), nullable=False),
        sa.Column("until_ms", sa.BigInteger(), nullable=False),
        sa.Column("ended_ms", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("group_no"),
    )
    is_open = sa.text("state = 'open'")
    op.create_index("queries_open", "queries", ["api_key", "number"], sqlite_where=is_open, postgresql_where=is_open)
