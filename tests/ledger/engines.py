"""SQLite engines with the settings that the store asks of its caller.

Each closes its connections when nobody holds it any more: since Python 3.13 an open one that is forgotten is a warning.
"""

import sqlite3
import weakref
from pathlib import Path

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.pool import StaticPool


def sqlite_memory() -> Engine:
    return _closed_at_last(create_engine("sqlite://", poolclass=StaticPool))


def sqlite_file(path: Path) -> Engine:
    engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": 30})

    @event.listens_for(engine, "connect")
    def durable(connection: sqlite3.Connection, _record: object) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")

    return _closed_at_last(engine)


def _closed_at_last(engine: Engine) -> Engine:
    weakref.finalize(engine, engine.pool.dispose)
    return engine
