"""Which schema a store has, and which one this software speaks: a number in the store, looked at whenever it is opened.

- An empty store gets the tables of today (`tables` and `payout_tables` beside this, `ledger.tables`) and the
  number `SCHEMA`.
- An older store is refused with the command that upgrades it, a newer one plainly: nobody writes what others would
  misread. Nothing is ever changed by opening.
- The number stands where Alembic keeps it. How a store gets from one number to the next is in `migrations`.
"""

import sqlalchemy as sa

from coordinator.store import payout_tables, tables
from ledger import store
from protocol.errors import ConfigInvalid

SCHEMA = 15
"""The newest step in `coordinator/store/migrations/versions`."""

stamp = sa.Table("alembic_version", sa.MetaData(), sa.Column("version_num", sa.String(32), primary_key=True))


def numbered(schema: int) -> str:
    """A schema's number as Alembic writes it."""
    return f"{schema:04}"


def stored_number(connection: sa.Connection) -> int | None:
    """The number of a store's schema; None if there are no tables."""
    here = sa.inspect(connection)
    if here.has_table(stamp.name):
        number = connection.execute(sa.select(stamp.c.version_num)).scalar()
        if number is not None and str(number).isdigit():
            return int(number)
    if here.has_table(tables.facts.name):
        raise ConfigInvalid(
            "The store has tables, but does not say of which schema.",
            hint="It is damaged, or older than all that can be upgraded: begin a new round.",
        )
    return None


def open_store(connection: sa.Connection) -> None:
    """Make the tables of a new store, or find that those of an old one are as they have to be."""
    there = stored_number(connection)
    if there is None:
        tables.metadata.create_all(connection)
        payout_tables.metadata.create_all(connection)
        store.create(connection)
        stamp.create(connection, checkfirst=True)
        connection.execute(sa.insert(stamp).values(version_num=numbered(SCHEMA)))
    elif there < SCHEMA:
        raise ConfigInvalid(
            f"The database has schema {there}, and this software needs {SCHEMA}.",
            hint="Stop the coordinator and run `swarm-coordinator upgrade FILE.toml`; it makes a backup first.",
        )
    else:
        require_known(there)


def require_known(there: int) -> None:
    """Refuse a store that a newer software has changed."""
    if there > SCHEMA:
        raise ConfigInvalid(
            f"The database has schema {there}, which is newer than this software ({SCHEMA}).",
            hint="Install the version of echo-swarm that it was opened with last, or restore the backup from before.",
        )
