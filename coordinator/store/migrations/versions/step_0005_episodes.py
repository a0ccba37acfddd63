"""Episodes: which tokens of a rollout were drawn; of rollouts from before, all were."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """A column."""
    op.add_column("rollouts", sa.Column("sampled", sa.LargeBinary(), nullable=True))
