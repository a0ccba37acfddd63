"""Keys of trainers: a key may have the right to publish versions; none had it before."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    """Add the right to publish to API keys."""
    op.add_column("api_keys", sa.Column("publishes", sa.Boolean(), nullable=False, server_default=sa.false()))
