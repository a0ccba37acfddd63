"""Held claims: they wait until their class is calibrated on the round's policy, and for no auditor."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"

audits = sa.table("audits", *(sa.column(name, sa.String()) for name in ("why", "finding", "held_as")),
                  sa.column("settled", sa.Boolean()))  # fmt: skip
HELD = (audits.c.held_as != sa.text("''")) & ~audits.c.settled
WAITS = (
    (audits.c.why != sa.text("''"))
    & audits.c.finding.is_(None)
    & ~audits.c.settled
    & (audits.c.held_as == sa.text("''"))
)


def upgrade() -> None:
    """Add a column; no claim of an older store is held."""
    op.add_column("audits", sa.Column("held_as", sa.String(), nullable=True))
    op.execute(sa.update(audits).values(held_as=""))
    op.drop_index("audits_waiting", "audits")
    with op.batch_alter_table("audits") as batch:
        batch.alter_column("held_as", existing_type=sa.String(), nullable=False)
    op.create_index("audits_waiting", "audits", ["version"], sqlite_where=WAITS)
    op.create_index("audits_held", "audits", ["owner"], sqlite_where=HELD, postgresql_where=HELD)
