"""Outcomes: the results of each prompt's groups, by which prompts are chosen."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Add a table."""
    op.create_table(
        "outcomes",
        sa.Column("prompt", sa.String(), primary_key=True),
        sa.Column("groups", sa.Integer(), nullable=False),
        sa.Column("mean", sa.Float(), nullable=False),
        sa.Column("variance", sa.Float(), nullable=False),
        sa.Column("alike", sa.Integer(), nullable=False),
        sa.Column("left_out", sa.Integer(), nullable=False),
    )
