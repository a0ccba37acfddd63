"""Turns of episodes: what the environment answered, and how long a group waits for a node with its version."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    """Replace the column of episodes that nodes played themselves; such rollouts are trained on without their marks."""
    with op.batch_alter_table("rollouts") as batch:
        batch.drop_column("sampled")
        batch.add_column(sa.Column("inserted", sa.LargeBinary(), nullable=True))
    op.add_column("groups", sa.Column("waits_until_ms", sa.BigInteger(), nullable=True))
