"""Temperature of a query: all earlier ones were asked at the round's."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    """Add a column, which is null at the round's temperature."""
    op.add_column("queries", sa.Column("temperature", sa.Float(), nullable=True))
