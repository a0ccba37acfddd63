"""Dialects under which all engines of a test process compile a statement once between them.

SQLAlchemy keeps compiled statements by engine, and each test of a store has an engine of its own: compiling them was a
quarter of such a test. A coordinator has one engine for life.
"""

from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite

_compiled: dict[Any, Any] = {}


class _Shared:
    """A dialect that equals any other of its class, since it is a part of the keys of compiled statements."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    @classmethod
    def engine_created(cls, engine: sa.Engine) -> None:
        engine.update_execution_options(compiled_cache=_compiled)


class SharedSqlite(_Shared, SQLiteDialect_pysqlite):
    """SQLite, whatever its file."""

    supports_statement_cache = True


class SharedPostgresql(_Shared, PGDialect_psycopg):
    """The one PostgreSQL of a test process."""

    supports_statement_cache = True


def register() -> None:
    """Use these dialects for every engine from now on."""
    registry.register("sqlite", __name__, SharedSqlite.__name__)
    registry.register("postgresql.psycopg", __name__, SharedPostgresql.__name__)
