"""PostgreSQL as a round's store: connections that behave as SQLite's do. Its driver is an extra, so import this late.

- A commit waits for the disk, whatever the server or the role is set to.
- Sums of 64-bit integers, which PostgreSQL hands out as decimals, are numbers as JSON and arithmetic know them.
- A process that stops in the middle of a transaction loses it after a minute, and with it the writers' lock.
"""

from typing import Any

import sqlalchemy as sa
from psycopg import Connection
from psycopg.abc import Buffer
from psycopg.adapt import Loader

from protocol.errors import ConfigInvalid

ON_EACH_CONNECTION = ("synchronous_commit = on", "idle_in_transaction_session_timeout = '60s'")


class _Number(Loader):
    """A decimal as an int, or as a float where it has a fraction."""

    def load(self, data: Buffer) -> int | float:
        text = bytes(data)
        return float(text) if b"." in text else int(text)


def engine(url: str) -> sa.Engine:
    """Connections to a database that answers now."""
    try:
        driver = sa.make_url(url).set(drivername="postgresql+psycopg")
        made = sa.create_engine(driver, isolation_level="AUTOCOMMIT", pool_pre_ping=True)
        sa.event.listen(made, "connect", _tune)
        made.connect().close()
    except (ValueError, sa.exc.ArgumentError, sa.exc.OperationalError) as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise ConfigInvalid(f"The database at store.url cannot be used: {reason}.") from None
    return made


def _tune(connection: Connection[Any], _record: object) -> None:
    connection.adapters.register_loader("numeric", _Number)
    for setting in ON_EACH_CONNECTION:
        connection.execute(f"SET {setting}")
