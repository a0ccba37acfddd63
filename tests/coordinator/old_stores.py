"""A store of the first schema with the rows of a real round, in both databases; and what any store's schema is.

- `stores/first.*.sql` are the tables as each database was told to make them, `stores/first.rows.jsonl` the rows of
  a round of three updates that two nodes sampled for. None of them ever changes.
"""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import sqlalchemy as sa

from coordinator.store.schema import stamp
from coordinator.store.state import engine

STORES = Path(__file__).parent / "stores"


def make_old(where: Path | str) -> Path | str:
    """Make a store of the first schema; on PostgreSQL in place of whatever is there."""
    if isinstance(where, Path):
        where.write_bytes(_old_file())
        return where
    wipe(where)
    _fill(where, (STORES / "first.postgresql.sql").read_text())
    return where


@cache
def _old_file() -> bytes:
    """Made once: syncing its tables one by one takes seconds."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "state.db"
        _fill(path, (STORES / "first.sqlite.sql").read_text())
        return path.read_bytes()


def _fill(where: Path | str, tables: str) -> None:
    opened = engine(where)
    with opened.connect() as connection:
        connection.exec_driver_sql("BEGIN")
        for statement in filter(str.strip, tables.split(";\n")):
            connection.exec_driver_sql(statement)
        stamp.create(connection)
        connection.execute(sa.insert(stamp).values(version_num="0001"))
        for table, rows in rows_of_the_round().items():
            reflected = sa.Table(table, sa.MetaData(), autoload_with=connection)
            connection.execute(sa.insert(reflected), rows)
        connection.exec_driver_sql("COMMIT")
    opened.dispose()


def rows_of_the_round() -> dict[str, list[dict[str, Any]]]:
    """Table → rows."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in (STORES / "first.rows.jsonl").read_text().splitlines():
        table, row = json.loads(line)
        values = {name: bytes.fromhex(value["hex"]) if _is_bytes(value) else value for name, value in row.items()}
        found.setdefault(table, []).append(values)
    return found


def _is_bytes(value: object) -> bool:
    return isinstance(value, dict) and set(value) == {"hex"}


def wipe(url: str) -> None:
    """An empty PostgreSQL."""
    opened = engine(url)
    with opened.connect() as connection:
        connection.exec_driver_sql("DROP SCHEMA public CASCADE")
        connection.exec_driver_sql("CREATE SCHEMA public")
    opened.dispose()


def schema_of(connection: sa.Connection) -> dict[str, Any]:
    """Return the schema of a database, in a fixed order."""
    here = sa.inspect(connection)
    return {name: _table(here, name) for name in sorted(here.get_table_names())}


def _table(here: sa.Inspector, name: str) -> dict[str, Any]:
    columns = {
        column["name"]: f"{column['type']!r}{'' if column['nullable'] else ' NOT NULL'} DEFAULT {column['default']}"
        for column in here.get_columns(name)
    }
    return {
        "columns": columns,
        "primary key": here.get_pk_constraint(name)["constrained_columns"],
        "unique": sorted(tuple(unique["column_names"]) for unique in here.get_unique_constraints(name)),
        "checks": sorted(check["sqltext"] for check in here.get_check_constraints(name)),
        "foreign keys": here.get_foreign_keys(name),
        "indexes": {
            str(index["name"]): (index["column_names"], bool(index["unique"]), _where(index))
            for index in here.get_indexes(name)
            if "duplicates_constraint" not in index
        },
    }


def _where(index: Any) -> str:
    """The rows that a partial index has."""
    options = index.get("dialect_options", {})
    return str(options.get("sqlite_where", options.get("postgresql_where", "")))
