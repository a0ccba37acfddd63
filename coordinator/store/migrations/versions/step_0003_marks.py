"""Components of a rollout's rewards: earlier rollouts have none."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

rollouts = sa.table("rollouts", sa.column("marks", sa.JSON()))


def upgrade() -> None:
    """Add a column that is not null."""
    op.add_column("rollouts", sa.Column("marks", sa.JSON(), nullable=True))
    op.execute(sa.update(rollouts).values(marks={}))
    with op.batch_alter_table("rollouts") as table:
        table.alter_column("marks", existing_type=sa.JSON(), nullable=False)
