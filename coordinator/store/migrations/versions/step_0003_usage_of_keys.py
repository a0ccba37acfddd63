"""The usage of each API key, counted at the key: it was counted from its queries and those that were deleted."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

FORGOTTEN = "forgotten_queries"

ANSWERED = """
UPDATE api_keys SET
    answered_queries = (SELECT COUNT(*) FROM queries WHERE queries.api_key = api_keys.number AND state = 'answered'),
    used_ms = (SELECT MAX(asked_ms) FROM queries WHERE queries.api_key = api_keys.number),
    tokens = (
        SELECT COALESCE(SUM(rollouts.tokens + COALESCE(
            (SELECT SUM(parts.tokens) FROM parts WHERE parts.whole = rollouts.claim_id), 0)), 0)
        FROM queries JOIN rollouts ON rollouts.group_no = queries.group_no
        WHERE queries.api_key = api_keys.number AND rollouts.group_no < 0 AND rollouts.state = 'served'
    )
"""


def upgrade() -> None:
    """Add the columns, count what is stored, and add what was deleted."""
    op.add_column("api_keys", sa.Column("answered_queries", sa.Integer(), server_default="0", nullable=False))
    op.add_column("api_keys", sa.Column("tokens", sa.BigInteger(), server_default="0", nullable=False))
    op.add_column("api_keys", sa.Column("used_ms", sa.BigInteger(), nullable=True))
    connection = op.get_bind()
    connection.execute(sa.text(ANSWERED))
    facts = sa.table("facts", sa.column("name", sa.String), sa.column("value", sa.JSON))
    keys = sa.table("api_keys", *map(sa.column, ("number", "answered_queries", "tokens")))
    deleted = connection.execute(sa.select(facts.c.value).where(facts.c.name == FORGOTTEN)).scalar() or {}
    for number, (answered, tokens) in deleted.items():
        more = {"answered_queries": keys.c.answered_queries + answered, "tokens": keys.c.tokens + tokens}
        connection.execute(sa.update(keys).where(keys.c.number == int(number)).values(more))
    connection.execute(sa.delete(facts).where(facts.c.name == FORGOTTEN))
