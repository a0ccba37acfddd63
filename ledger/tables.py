"""The tables of the ledger's store, with the constraints that the database enforces.

- Constraints back up the code: one row per effect, and only `outside` may be below zero.
- Entries are looked up by their effect only. Equal content has an equal effect, and each further index of hashes costs
  a page of its own for every entry, which limits the growth rate of a large ledger.
- Columns are as wide as the longest names that `ledger.entry` makes.
"""

import sqlalchemy as sa

metadata = sa.MetaData()

_Index = sa.BigInteger().with_variant(sa.Integer, "sqlite")
"""The type of an index: on SQLite only an INTEGER primary key is the row id itself."""

head_table = sa.Table(
    "ledger_head",
    metadata,
    sa.Column("id", sa.Integer, sa.CheckConstraint("id = 0"), primary_key=True, autoincrement=False),
    sa.Column("size", sa.BigInteger, nullable=False),
)
entries_table = sa.Table(
    "ledger_entries",
    metadata,
    sa.Column("index", _Index, primary_key=True, autoincrement=False),
    sa.Column("content_hash", sa.String(64), nullable=False),
    sa.Column("effect", sa.String(120), nullable=False, unique=True),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Column("recorded_ms", sa.BigInteger, nullable=False),
)
balances_table = sa.Table(
    "ledger_balances",
    metadata,
    sa.Column("account", sa.String(80), primary_key=True),
    sa.Column("micros", sa.BigInteger, nullable=False),
    sa.CheckConstraint("account = 'outside' OR micros >= 0", name="ledger_no_debt"),
)
claims_table = sa.Table(
    "ledger_claims",
    metadata,
    sa.Column("claim_id", sa.String(64), primary_key=True),
    sa.Column("node_id", sa.String(64), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("amount_micros", sa.BigInteger, nullable=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),
    sa.Column("entry_hash", sa.String(64), nullable=False),
)
tiles_table = sa.Table(
    "ledger_tiles",
    metadata,
    sa.Column("level", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("width", sa.Integer, nullable=False),
    sa.Column("hashes", sa.LargeBinary, nullable=False),
)
cosignatures_table = sa.Table(
    "ledger_cosignatures",
    metadata,
    sa.Column("witness", sa.String(300), primary_key=True),  # the key in its written form
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.Column("time_s", sa.BigInteger, nullable=False),
    sa.Column("note", sa.LargeBinary, nullable=False),  # with the log's line and this witness's
)
checkpoint_table = sa.Table(
    "ledger_checkpoint",
    metadata,
    sa.Column("id", sa.Integer, sa.CheckConstraint("id = 0"), primary_key=True, autoincrement=False),
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.Column("root", sa.LargeBinary, nullable=False),
    sa.Column("note", sa.LargeBinary, nullable=False),
)
