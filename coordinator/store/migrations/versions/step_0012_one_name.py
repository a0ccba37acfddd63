"""Ledger entries are looked up only by their effect: the unused index of content hashes is removed."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"

COLUMNS = '"index", content_hash, effect, kind, body, recorded_ms'


def upgrade() -> None:
    """Drop the constraint on PostgreSQL; copy the table without it on SQLite."""
    if op.get_bind().dialect.name == "postgresql":
        op.drop_constraint("ledger_entries_content_hash_key", "ledger_entries")
        return
    op.create_table(
        "entries_anew",
        sa.Column("index", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False),
        sa.Column("content_hash", sa.String(length=64), nullable=False),
        sa.Column("effect", sa.String(length=120), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("recorded_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("index"),
        sa.UniqueConstraint("effect"),
    )
    op.execute(f'INSERT INTO entries_anew ({COLUMNS}) SELECT {COLUMNS} FROM ledger_entries ORDER BY "index"')
    op.drop_table("ledger_entries")
    op.rename_table("entries_anew", "ledger_entries")
