"""Names of nodes: which are shown alone, and which with the end of the node's id, as effects.

1. A name is stored as it is shown: plain (`protocol.people.names`), and with the node's id where readers could be
   misled. 2. Of all names that look alike, those of one owner are shown alone, on as many nodes as the owner likes. The
   rows of these nodes have the skeleton. 3. That is the first owner with the name, until one who has earned something
   asks for it: keys are free, so a name that nobody holds by work can be gained by work. Among owners who have earned,
   the first keeps it. 4. No name keeps a node from joining; a node with a default name, which many machines have, is
   shown with its id.
"""

from typing import Any

import sqlalchemy as sa

from coordinator.store.tables import nodes
from protocol.ids import NodeId
from protocol.limits import NAME_MAX_CHARS
from protocol.people import names
from protocol.people.names import nickname

_colleagues = sa.alias(nodes)
_HAS_EARNED = sa.exists().where(_colleagues.c.owner == nodes.c.owner, _colleagues.c.earned).label("has_earned")


def record_name(connection: sa.Connection, node: NodeId, asked: str) -> None:
    """Store the name of a registered node."""
    name = names.plain_name(asked) or nickname(node)
    skeleton = names.skeleton(name)
    (me,) = connection.execute(sa.select(nodes.c.owner, _HAS_EARNED).where(nodes.c.node_id == node))
    held = nodes.c.skeleton == skeleton  # by one owner, so any of its nodes stands for all
    holder = connection.execute(sa.select(nodes.c.owner, _HAS_EARNED).where(held).limit(1)).first()
    stands_alone = not names.is_imitation(name, node)
    if stands_alone and holder is not None and holder.owner != me.owner:
        stands_alone = me.has_earned and not holder.has_earned
        if stands_alone:
            connection.execute(sa.update(nodes).where(held).values(name=_WITH_ID, skeleton=None))
    values: dict[str, Any] = {"name": name, "skeleton": skeleton}
    if not stands_alone:
        values = {"name": names.with_id(name, node), "skeleton": None}
    connection.execute(sa.update(nodes).where(nodes.c.node_id == node).values(**values))


def contest_name(connection: sa.Connection, node: NodeId) -> None:
    """Show the name of a node whose owner has earned something alone, if nobody with the same right has it."""
    stmt = sa.select(nodes.c.name, nodes.c.skeleton).where(nodes.c.node_id == node)
    row = connection.execute(stmt).one()
    if row.skeleton is None:
        record_name(connection, node, names.without_id(row.name))


_KEPT_CHARS = NAME_MAX_CHARS - names.ID_CHARS - 3
_WITH_ID = (
    sa.func.rtrim(sa.func.substr(nodes.c.name, 1, _KEPT_CHARS))
    + " ("
    + sa.func.substr(nodes.c.node_id, sa.func.length(nodes.c.node_id) - names.ID_CHARS + 1)
    + ")"
)
"""The names of `names.with_id`, for any number of nodes at once."""
