"""A consistent copy of a store while others write to it, and its loading.

- A copy is a snapshot of one moment, which can be read before anything is copied (`moment`); writers continue.
- SQLite: its online backup, inside a read transaction. It is one file.
- PostgreSQL: `COPY` of every table in one REPEATABLE READ transaction. The tables' definitions are read from the
  database itself, so a store of any schema can be saved; `schema.sql` and a file per table, as text.
- Loading needs an empty PostgreSQL, and is done in one transaction.
"""

import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.schema import CreateIndex, CreateTable

from coordinator.store.state import engine
from protocol.errors import ConfigInvalid

Tell = Callable[[str, int, int], None]
"""A callback for progress: the step's name, the amount done, and the total."""

PAGES_AT_ONCE = 2048
"""Pages of SQLite's online backup between two progress reports."""

PIECE_BYTES = 2**20

FILE = "state.db"
DEFINITIONS = "schema.sql"
END = ";\n"


def save(
    where: Path | str,
    folder: Path,
    tell: Tell,
    look: Callable[[sa.Connection], None] | None = None,
    *,
    pages_at_once: int = PAGES_AT_ONCE,
) -> None:
    """Write a copy of the store as it is now into a folder."""
    with moment(where) as connection:
        copy(connection, folder, tell, look, pages_at_once=pages_at_once)


@contextmanager
def moment(where: Path | str) -> Iterator[sa.Connection]:
    """Yield a connection that reads the store as it is now, for as long as it is open."""
    made = engine(where) if isinstance(where, str) else _only_read(where)
    try:
        with made.connect() as connection:
            if isinstance(where, str):
                connection.exec_driver_sql("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
                connection.exec_driver_sql("SELECT count(*) FROM pg_class")
            else:
                connection.exec_driver_sql("BEGIN")
                connection.exec_driver_sql("SELECT count(*) FROM sqlite_master")
            yield connection  # the first query has fixed the moment
            connection.exec_driver_sql("ROLLBACK")
    finally:
        made.dispose()


def copy(
    connection: sa.Connection,
    folder: Path,
    tell: Tell,
    look: Callable[[sa.Connection], None] | None = None,
    *,
    pages_at_once: int = PAGES_AT_ONCE,
) -> None:
    """Write a copy of a moment into a folder; `look` can read the copied data."""
    folder.mkdir(parents=True)
    if connection.dialect.name == "sqlite":
        _copy_sqlite(_driver(connection), folder / FILE, tell, pages_at_once)
        if look:
            with opened(folder / FILE) as copied:
                look(copied)
    else:
        _copy_postgresql(connection, folder, tell)
        if look:
            look(connection)


def load(folder: Path, where: str, tell: Tell) -> None:
    """Load the files that `save` wrote into an empty PostgreSQL."""
    with opened(where) as connection:
        if tables := sa.inspect(connection).get_table_names():
            raise ConfigInvalid(
                f"The database at store.url is not empty ({len(tables)} tables).", hint="Give an empty database."
            )
        connection.exec_driver_sql("BEGIN")
        for statement in filter(str.strip, (folder / DEFINITIONS).read_text().split(END)):
            connection.exec_driver_sql(statement)
        files = sorted(folder.glob("*.copy"))
        for number, path in enumerate(files):
            tell(path.stem, number, len(files))
            _load_table(connection, path)
        connection.exec_driver_sql("COMMIT")


@contextmanager
def opened(where: Path | str) -> Iterator[sa.Connection]:
    """Yield a connection to a store; it is closed without a commit."""
    made = engine(where)
    try:
        with made.connect() as connection:
            yield connection
    finally:
        made.dispose()


def _only_read(path: Path) -> sa.Engine:
    uri = f"{path.absolute().as_uri()}?mode=ro"
    how: dict[str, Any] = {"isolation_level": "AUTOCOMMIT", "poolclass": sa.NullPool}
    return sa.create_engine("sqlite://", creator=lambda: sqlite3.connect(uri, uri=True), **how)


def _copy_sqlite(source: sqlite3.Connection, target: Path, tell: Tell, pages_at_once: int) -> None:
    def step(_status: int, remaining: int, total: int) -> None:
        tell("store", total - remaining, total)

    with closing(sqlite3.connect(target)) as copied:
        source.backup(copied, pages=pages_at_once, progress=step)
        if (said := copied.execute("PRAGMA integrity_check").fetchone()[0]) != "ok":
            raise ConfigInvalid(f"The store is damaged: {said}.", hint="For details, run `swarm-coordinator fsck`.")


def _copy_postgresql(connection: sa.Connection, folder: Path, tell: Tell) -> None:
    tables = _tables(connection)
    (folder / DEFINITIONS).write_text(_definitions(tables, connection.dialect))
    for number, table in enumerate(tables):
        tell(table.name, number, len(tables))
        names = ", ".join(connection.dialect.identifier_preparer.quote(column.name) for column in table.columns)
        _copy_out(connection, f'COPY "{table.name}" ({names}) TO STDOUT', folder / f"{table.name}.copy", names)


def _tables(connection: sa.Connection) -> list[sa.Table]:
    """Return the database's tables, with the constraints that reflection omits."""
    metadata = sa.MetaData()
    metadata.reflect(connection)
    inspector = sa.inspect(connection)
    for table in metadata.sorted_tables:
        names = {constraint.name for constraint in table.constraints}
        for check in inspector.get_check_constraints(table.name):
            if check["name"] in names:  # newer versions of SQLAlchemy reflect them
                continue
            table.append_constraint(sa.CheckConstraint(check["sqltext"], name=check["name"]))
        for column in table.columns:
            if "nextval(" in str(getattr(column.server_default, "arg", "")):
                column.server_default = None  # its sequence is created with it
    return metadata.sorted_tables


def _definitions(tables: list[sa.Table], dialect: sa.Dialect) -> str:
    statements: list[Any] = [CreateTable(table) for table in tables]
    statements += [CreateIndex(index) for table in tables for index in sorted(table.indexes, key=lambda i: str(i.name))]
    return "".join(str(statement.compile(dialect=dialect)).strip() + END for statement in statements)


def _copy_out(connection: sa.Connection, command: str, target: Path, names: str) -> None:
    """Write the table's rows to `target`, after a line with the columns in `names`."""
    with target.open("wb") as file, _driver(connection).cursor() as cursor, cursor.copy(command) as rows:
        file.write(names.encode() + b"\n")
        for piece in rows:
            file.write(piece)


def _load_table(connection: sa.Connection, path: Path) -> None:
    with path.open("rb") as file:
        names = file.readline().decode().strip()
        command = f'COPY "{path.stem}" ({names}) FROM STDIN'
        with _driver(connection).cursor() as cursor, cursor.copy(command) as rows:
            while piece := file.read(PIECE_BYTES):
                rows.write(piece)
    for name in re.findall(r"\w+", names):
        sequence = connection.execute(sa.select(sa.func.pg_get_serial_sequence(f'"{path.stem}"', name))).scalar()
        if sequence:
            connection.exec_driver_sql(
                f'SELECT setval(\'{sequence}\', (SELECT coalesce(max("{name}"), 0) + 1 FROM "{path.stem}"), false)'
            )


def _driver(connection: sa.Connection) -> Any:
    """Return the driver's own connection, which supports COPY."""
    return connection.connection.driver_connection
