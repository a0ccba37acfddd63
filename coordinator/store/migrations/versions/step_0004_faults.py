"""Whose fault took a claim out of escrow: claims from before were taken by none."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """A column."""
    op.add_column("audits", sa.Column("fault", sa.String(), nullable=True))
