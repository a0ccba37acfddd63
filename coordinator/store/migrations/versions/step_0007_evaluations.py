"""Evaluations, and the problem that a group is about: until now, group n was about problem n of the train split."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

groups = sa.table("groups", sa.column("group_no", sa.Integer()), sa.column("split"), sa.column("prompt", sa.Integer()))


def upgrade() -> None:
    """Add a table, two columns that are not null, and one that may be null."""
    for column in (
        sa.Column("split", sa.String(), nullable=True),
        sa.Column("prompt", sa.Integer(), nullable=True),
        sa.Column("evaluation", sa.Integer(), nullable=True),
    ):
        op.add_column("groups", column)
    op.execute(sa.update(groups).values(split="train", prompt=groups.c.group_no))
    with op.batch_alter_table("groups") as table:
        table.alter_column("split", existing_type=sa.String(), nullable=False)
        table.alter_column("prompt", existing_type=sa.Integer(), nullable=False)
    op.create_index("ix_groups_evaluation", "groups", ["evaluation"])
    op.create_table(
        "evaluations",
        sa.Column("number", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("policy_update", sa.BigInteger(), nullable=False),
        sa.Column("split", sa.String(), nullable=False),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.Column("problems", sa.Integer(), nullable=False),
        sa.Column("solved", sa.Float(), nullable=False),
        sa.Column("why", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("begun_ms", sa.BigInteger(), nullable=False),
        sa.Column("ended_ms", sa.BigInteger(), nullable=True),
        sa.Column("axes", sa.JSON(), nullable=False),
        sa.Column("result", sa.JSON(), nullable=True),
    )
    op.create_index("ix_evaluations_state", "evaluations", ["state"])
