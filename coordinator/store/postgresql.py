"""PostgreSQL as a round's store: connections that behave as those of SQLite. Import this late: its driver is an extra.

- A commit waits for the disk, whatever the server or the role is set to.
- Sums of 64-bit integers, which PostgreSQL returns as decimals, become integers or floats.
- A process that stops in the middle of a transaction loses it after a minute, and with it the writers' lock.
- Frequent statements (`ledger.prepared`) bypass the driver's cursors, which take several times as long.
"""

import re
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from psycopg import Connection
from psycopg.abc import Buffer
from psycopg.adapt import Loader, PyFormat, Transformer
from psycopg.errors import InvalidSqlStatementName, OperationalError, error_from_result
from psycopg.pq import ConnStatus, ExecStatus

from ledger.prepared import STRAIGHT, Answer
from protocol.errors import ConfigInvalid

ON_EACH_CONNECTION = ("synchronous_commit = on", "idle_in_transaction_session_timeout = '60s'")

_PLACE = re.compile(r"%\((\w+)\)s|%s|%%")


class _Number(Loader):
    """A loader of decimals: as an int, or as a float if there is a fraction."""

    def load(self, data: Buffer) -> int | float:
        text = bytes(data)
        return float(text) if b"." in text else int(text)


class _Statement:
    """A statement that one connection has prepared, with the formats of its values and rows."""

    def __init__(self, connection: Connection[Any], name: bytes, text: str, values: Any) -> None:
        self.name = name
        places: dict[Any, int] = {}

        def numbered(match: re.Match[str]) -> str:
            if match[0] == "%%":
                return "%"
            return f"${places.setdefault(match[1] or len(places), len(places) + 1)}"

        written = _PLACE.sub(numbered, text)
        self.places = list(places)
        # Integers in binary would have the size of the value, but the server expects the size of the column.
        self.formats = [PyFormat.BINARY if isinstance(values[place], bytes) else PyFormat.TEXT for place in places]
        self.types: Sequence[int] = ()
        self.transformer = Transformer(connection)
        _checked(connection, connection.pgconn.prepare(name, written.encode()))


class _Straight:
    """Statements of one connection, each prepared when it first runs and then passed to libpq as it is.

    Use it only for statements that wait for nothing but the server: the process reacts to nothing else, even Ctrl-C.
    """

    def __init__(self, connection: Connection[Any]) -> None:
        self._connection = connection
        self._statements: dict[str, _Statement] = {}

    def __call__(self, text: str, values: Any) -> Answer:
        pgconn = self._connection.pgconn
        if pgconn.status != ConnStatus.OK:
            raise OperationalError("the connection is lost")
        if values is None:
            _checked(self._connection, pgconn.exec_(text.encode()))
            return [], -1, ()
        made = self._statements.get(text) or self._prepare(text, values)
        written = made.transformer.dump_sequence([values[place] for place in made.places], made.formats)
        result = pgconn.exec_prepared(made.name, written, made.transformer.formats)  # type: ignore[arg-type]  # a NULL is None
        try:
            _checked(self._connection, result)
        except InvalidSqlStatementName:  # all prepared statements were dropped
            self._statements.clear()
            raise
        if result.status != ExecStatus.TUPLES_OK:
            return [], result.command_tuples or 0, ()
        made.types = made.types or [result.ftype(column) for column in range(result.nfields)]
        made.transformer.set_pgresult(result)
        rows = made.transformer.load_rows(0, result.ntuples, tuple)
        return rows, result.ntuples, made.types

    def _prepare(self, text: str, values: Any) -> _Statement:
        name = f"straight_{len(self._statements)}".encode()
        made = self._statements[text] = _Statement(self._connection, name, text, values)
        return made


def _checked(connection: Connection[Any], result: Any) -> None:
    if result.status not in (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK):
        raise error_from_result(result, encoding=connection.info.encoding)


def engine(url: str) -> sa.Engine:
    """Return an engine for a database, after one test connection."""
    try:
        driver = sa.make_url(url).set(drivername="postgresql+psycopg")
        # The connection that was used last has its statements prepared.
        made = sa.create_engine(driver, isolation_level="AUTOCOMMIT", pool_pre_ping=True, pool_use_lifo=True)
        sa.event.listen(made, "connect", _tune)
        made.connect().close()
    except (ValueError, sa.exc.ArgumentError, sa.exc.OperationalError) as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise ConfigInvalid(f"The database at store.url cannot be used: {reason}.") from None
    return made


def _tune(connection: Connection[Any], record: Any) -> None:
    connection.adapters.register_loader("numeric", _Number)
    for setting in ON_EACH_CONNECTION:
        connection.execute(f"SET {setting}")
    record.info[STRAIGHT] = _Straight(connection)
