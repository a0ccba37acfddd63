"""Episodes: the tokens of a rollout that were drawn; of earlier rollouts, all were."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add a column."""
    op.add_column("rollouts", sa.Column("sampled", sa.LargeBinary(), nullable=True))
