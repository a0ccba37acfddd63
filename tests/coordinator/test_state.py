"""The store: an effect happens wholly or not at all, and what was acknowledged is on the disk."""

import asyncio
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa

from coordinator import tables
from coordinator.state import Database, get_fact, set_fact


def test_a_failed_effect_leaves_nothing(tmp_path: Path) -> None:
    database = Database(tmp_path / "state.db")

    def fails(connection: sa.Connection) -> None:
        set_fact(connection, "a", 1)
        connection.execute(sa.insert(tables.groups).values(group_no=1, state="open"))
        raise KeyError

    with pytest.raises(KeyError):
        database.run_now(fails)
    assert database.run_now(get_fact, "a") is None
    assert database.run_now(lambda conn: conn.execute(sa.select(tables.groups)).all()) == []
    database.run_now(set_fact, "a", 2)
    database.close()


def test_what_was_acknowledged_is_there_after_a_restart(tmp_path: Path) -> None:
    first = Database(tmp_path / "state.db")
    first.run_now(set_fact, "a", {"b": [1, None, "é"]})
    second = Database(tmp_path / "state.db")  # the first was never closed, as after kill -9
    assert second.run_now(get_fact, "a") == {"b": [1, None, "é"]}
    first.close()
    second.close()


def test_every_connection_is_durable(tmp_path: Path) -> None:
    database = Database(tmp_path / "state.db")

    def pragmas(connection: sa.Connection) -> list[object]:
        names = ("journal_mode", "synchronous", "foreign_keys")
        return [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in names]

    full = 2
    assert database.run_now(pragmas) == ["wal", full, 1]
    database.close()


@pytest.mark.asyncio
async def test_effects_of_many_tasks_follow_each_other(tmp_path: Path) -> None:
    database = Database(tmp_path / "state.db")

    def increment(connection: sa.Connection) -> None:
        set_fact(connection, "n", get_fact(connection, "n", 0) + 1)

    async with asyncio.TaskGroup() as group:
        for _ in range(30):
            group.create_task(database.run(increment))
    assert await database.run(get_fact, "n") == 30
    database.close()


def test_a_fact_that_was_never_set_has_its_default(tmp_path: Path) -> None:
    database = Database(tmp_path / "state.db")
    assert database.run_now(get_fact, "nothing", 7) == 7
    database.run_now(set_fact, "nothing", False)
    assert database.run_now(get_fact, "nothing", 7) is False
    database.close()


def test_a_long_read_does_not_hold_up_the_writer_and_sees_one_moment(tmp_path: Path) -> None:
    database = Database(tmp_path / "state.db")
    database.run_now(set_fact, "a", 1)
    begun, ended = threading.Event(), threading.Event()

    def looks_twice(connection: sa.Connection) -> tuple[int, int]:
        before = get_fact(connection, "a")
        begun.set()
        ended.wait()
        return before, get_fact(connection, "a")

    async def both() -> tuple[int, int]:
        reading = asyncio.create_task(database.read(looks_twice))
        await asyncio.to_thread(begun.wait)
        try:
            async with asyncio.timeout(30):
                await database.run(set_fact, "a", 2)
        finally:
            ended.set()
        assert await database.read(get_fact, "a") == 2
        return await reading

    assert asyncio.run(both()) == (1, 1)
    database.close()


def test_what_is_called_as_a_read_cannot_write_and_the_next_writer_can(tmp_path: Path) -> None:
    database = Database(tmp_path / "state.db")
    with pytest.raises(sa.exc.OperationalError, match="readonly"):
        asyncio.run(database.read(set_fact, "a", 1))
    database.run_now(set_fact, "a", 2)
    assert asyncio.run(database.read(get_fact, "a")) == 2
    database.close()
