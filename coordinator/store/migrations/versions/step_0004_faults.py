"""The fault that took a claim out of escrow: earlier claims have none."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add a column."""
    op.add_column("audits", sa.Column("fault", sa.String(), nullable=True))
