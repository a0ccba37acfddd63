"""The tables of payouts; `coordinator.store.tables` says how tables change."""

import sqlalchemy as sa

metadata = sa.MetaData()

# Payout batches, their states, and their payees with amounts.
payout_batches = sa.Table(
    "payout_batches",
    metadata,
    sa.Column("batch", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("rail", sa.String, nullable=False),
    sa.Column("reference", sa.String, nullable=True, unique=True),
    sa.Column("checkpoint_size", sa.BigInteger, nullable=False),
    sa.Column("made_ms", sa.BigInteger, nullable=False),
)
payees = sa.Table(
    "payees",
    metadata,
    sa.Column("batch", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("place", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("owner", sa.String, nullable=False),
    sa.Column("address", sa.String, nullable=False),
    sa.Column("amount_micros", sa.BigInteger, nullable=False),
)
