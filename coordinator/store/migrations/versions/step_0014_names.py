"""Names that look like another owner's get the end of the node's id; the first owner to earn, or to join, keeps it."""

import sqlalchemy as sa
from alembic import op

from protocol.people import names
from protocol.people.nicknames import nickname

revision = "0014"
down_revision = "0013"

nodes = sa.table(
    "nodes",
    *(sa.column(name, sa.String()) for name in ("node_id", "owner", "name", "skeleton")),
    sa.column("earned", sa.Boolean()),
    sa.column("registered_ms", sa.BigInteger()),
)


def upgrade() -> None:
    """Add a column, which stays empty for nodes that are shown with their id."""
    op.add_column("nodes", sa.Column("skeleton", sa.String(), nullable=True))
    op.create_index("ix_nodes_skeleton", "nodes", ["skeleton"])
    op.drop_index("ix_nodes_owner", "nodes")
    op.create_index("nodes_by_owner", "nodes", ["owner", "earned"])
    rows = op.get_bind().execute(sa.select(nodes.c.node_id, nodes.c.owner, nodes.c.name, nodes.c.earned)
                                 .order_by(nodes.c.registered_ms, nodes.c.node_id)).all()  # fmt: skip
    have_earned = {row.owner for row in rows if row.earned}
    holders: dict[str, str] = {}
    for row in sorted(rows, key=lambda row: row.owner not in have_earned):
        name = names.plain_name(row.name) or nickname(row.node_id)
        skeleton: str | None = names.skeleton(name)
        if names.is_imitation(name, row.node_id) or holders.setdefault(str(skeleton), row.owner) != row.owner:
            name, skeleton = names.with_id(name, row.node_id), None
        op.execute(sa.update(nodes).where(nodes.c.node_id == row.node_id).values(name=name, skeleton=skeleton))
