"""The schema of a store and that of this software: a number in the store, checked whenever it is opened.

- An empty store gets the present tables (`tables` beside this, `ledger.tables`) and the number `SCHEMA`.
- An older store is refused with the command that upgrades it. A newer one is refused, too, since its data could be
  misread. Opening a store never changes an existing one.
- The number is stored where Alembic keeps it. The steps from one number to the next are in `migrations`.
"""

import sqlalchemy as sa

from coordinator.store import tables
from ledger import store
from protocol.errors import ConfigInvalid

SCHEMA = 4
"""The newest step in `coordinator/store/migrations/versions`."""

stamp = sa.Table("alembic_version", sa.MetaData(), sa.Column("version_num", sa.String(32), primary_key=True))


def numbered(schema: int) -> str:
    """Return a schema's number as Alembic writes it."""
    return f"{schema:04}"


def stored_number(connection: sa.Connection) -> int | None:
    """Return the number of a store's schema; None if there are no tables."""
    inspector = sa.inspect(connection)
    if inspector.has_table(stamp.name):
        number = connection.execute(sa.select(stamp.c.version_num)).scalar()
        if number is not None and str(number).isdigit():
            return int(number)
    if inspector.has_table(tables.facts.name):
        raise ConfigInvalid(
            "The store has tables, but no schema number.",
            hint="It is damaged, or too old to upgrade: begin a new round.",
        )
    return None


def open_store(connection: sa.Connection) -> None:
    """Make the tables of a new store, or check the schema of an existing one."""
    there = stored_number(connection)
    if there is None:
        tables.metadata.create_all(connection)
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
    """Refuse a store with a newer schema than this software's."""
    if there > SCHEMA:
        raise ConfigInvalid(
            f"The database has schema {there}, which is newer than this software ({SCHEMA}).",
            hint="Install the version of echo-swarm that it was opened with last, or restore the backup from before.",
        )
