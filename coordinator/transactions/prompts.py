"""The problem that a group is about, as effects.

- A group of the learner's is about a problem of the train split; one of an evaluation, of another split. A group may
  also be about a query of the endpoint, which is no problem of the task.
- The problem is chosen once, when the group is made, and stored with it: it does not change with the group's leases.
"""

import sqlalchemy as sa

from coordinator.rules.prompt_refs import PromptRef
from coordinator.store.tables import groups
from ledger.prepared import Prepared

# Built once: making a statement costs more than running it, and this one runs for every lease and every rollout.
_source = Prepared(
    sa.select(groups.c.split, groups.c.prompt.label("number")).where(groups.c.group_no == sa.bindparam("group")),
    PromptRef,
)


def source_of(connection: sa.Connection, group_no: int) -> PromptRef:
    """Return the reference of the problem that a group is about."""
    return _source(connection, group=group_no).single_row()
