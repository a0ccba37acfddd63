"""The coordinator's store: one database, one writer thread, and every change as one transaction.

- An *effect* is a plain function `(connection, …) → outcome`. `Database.run` calls it in one transaction: all of it is
  durable when the call returns, or none of it happened.
- What only reads, and takes long, is for `Database.read`: on a thread of its own, beside the writer, which goes on.
- SQLite in WAL mode with synchronous=FULL: what was acknowledged survives `kill -9` and a power cut.
- Effects take `now_ms` and random values as arguments; none of them looks at a clock.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa

from coordinator import tables
from coordinator.tables import facts
from ledger import store

P = ParamSpec("P")
T = TypeVar("T")


class Database:
    """The store of one round."""

    def __init__(self, path: Path) -> None:
        # Autocommit, because the driver must not guess transactions: run_now begins and ends each one itself.
        self._engine = sa.create_engine(f"sqlite:///{path}", isolation_level="AUTOCOMMIT")
        sa.event.listen(self._engine, "connect", _tune_sqlite)
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reader")
        with self._engine.connect() as connection:
            tables.metadata.create_all(connection)
            store.create(connection)

    async def run(self, effect: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call an effect in one transaction on the writer thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._writer, lambda: self.run_now(effect, *args, **kwargs))

    async def read(self, effect: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call an effect that changes nothing; it sees the store as it was when it began, and waits for other reads."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._reader, lambda: self._read_now(effect, *args, **kwargs))

    def _read_now(self, effect: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        with self._engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA query_only=ON")
            connection.exec_driver_sql("BEGIN")
            try:
                return effect(connection, *args, **kwargs)
            finally:
                connection.exec_driver_sql("ROLLBACK")
                connection.exec_driver_sql("PRAGMA query_only=OFF")

    def run_now(self, effect: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same without a loop, for start-up and commands."""
        with self._engine.connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            try:
                outcome = effect(connection, *args, **kwargs)
            except BaseException:
                connection.exec_driver_sql("ROLLBACK")
                raise
            connection.exec_driver_sql("COMMIT")
            return outcome

    def close(self) -> None:
        self._writer.shutdown(wait=True)
        self._reader.shutdown(wait=True)
        self._engine.dispose()


def _tune_sqlite(connection: Any, _record: object) -> None:
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=10000"):
        connection.execute(f"PRAGMA {pragma}")


def get_fact(connection: sa.Connection, name: str, default: Any = None) -> Any:
    """A single remembered value."""
    row = connection.execute(sa.select(facts.c.value).where(facts.c.name == name)).first()
    return row[0] if row else default


def set_fact(connection: sa.Connection, name: str, value: Any) -> None:
    changed = connection.execute(sa.update(facts).where(facts.c.name == name).values(value=value)).rowcount
    if not changed:
        connection.execute(sa.insert(facts).values(name=name, value=value))
