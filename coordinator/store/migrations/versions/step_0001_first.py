"""The first schema: every store has at least this one.

No step leads to it: `coordinator.store.schema` makes the tables. `tests/coordinator/stores/` has the first ones, with
the rows of a round.
"""

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Change nothing: this is the first schema."""
