"""The usage of each API key by day, and priority and price of queries; older ones have neither.

Days are counted from the queries that are stored; deleted ones are in the sums of their keys alone.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

COUNTED = """
INSERT INTO key_days (api_key, day, answered_queries, prompt_tokens, tokens, spent_micros)
SELECT api_key, ended_ms / 86400000, COUNT(*),
    SUM(CASE WHEN claim_id IS NULL THEN 0 ELSE LENGTH(prompt) / 4 END),
    SUM(COALESCE(tokens, 0) + COALESCE(
        (SELECT SUM(parts.tokens) FROM parts WHERE parts.whole = answered.claim_id), 0)),
    SUM(COALESCE(credit_micros, 0) + COALESCE(
        (SELECT SUM(parts.credit_micros) FROM parts WHERE parts.whole = answered.claim_id), 0))
FROM (
    SELECT queries.api_key, queries.ended_ms, queries.prompt, served.claim_id, served.tokens, served.credit_micros
    FROM queries LEFT JOIN rollouts AS served
        ON served.group_no = queries.group_no AND served.group_no < 0 AND served.state = 'served'
    WHERE queries.state = 'answered'
) AS answered
GROUP BY api_key, ended_ms / 86400000
"""


def upgrade() -> None:
    """Add the table and the columns, and count what is stored."""
    op.add_column("queries", sa.Column("priority", sa.Integer(), server_default="0", nullable=False))
    op.add_column("queries", sa.Column("max_price", sa.BigInteger(), nullable=True))
    op.create_table(
        "key_days",
        sa.Column("api_key", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("day", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("answered_queries", sa.Integer(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("spent_micros", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("api_key", "day"),
    )
    op.get_bind().execute(sa.text(COUNTED))
