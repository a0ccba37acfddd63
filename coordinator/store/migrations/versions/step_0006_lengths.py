"""Expected lengths of groups: those of earlier groups are unknown."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add a column and a table."""
    op.add_column("groups", sa.Column("expected", sa.Float(), nullable=True))
    op.create_table(
        "lengths",
        sa.Column("prompts", sa.String(), nullable=False),
        sa.Column("mean", sa.Float(), nullable=False),
        sa.Column("groups", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("prompts"),
    )
