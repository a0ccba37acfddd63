"""The first schema: every store has at least this one.

Nothing leads here: tables are made by `coordinator.store.schema`. What the first ones were is kept, with the rows of
a round, in `tests/coordinator/stores/`.
"""

revision = "0001"
down_revision = None


def upgrade() -> None:
    """There is nothing before it."""
