"""The store: an effect happens wholly or not at all, and what was acknowledged is on the disk."""

import asyncio
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from coordinator.store import tables
from coordinator.store.facts import Fact, get_fact, set_fact
from coordinator.store.state import READS_WAITING_MAX, WAITING_MAX, Database, FollowingEffect
from protocol.errors import Overloaded
from tests.coordinator.unsynced import synced

A = Fact[Any]("a", None)
GONE = Fact[Any]("gone", None)
HALF = Fact[Any]("half", None)
N = Fact("n", 0)
NOTHING = Fact[bool | int]("nothing", 7)


def test_a_failed_effect_leaves_nothing(tmp_path: Path) -> None:
    database = Database(tmp_path / "state.db")

    def fails(connection: sa.Connection) -> None:
        set_fact(connection, A, 1)
        connection.execute(sa.insert(tables.groups).values(group_no=1, split="train", prompt=0, state="open"))
        raise KeyError

    with pytest.raises(KeyError):
        database.run_now(fails)
    assert database.run_now(get_fact, A) is None
    assert database.run_now(lambda conn: conn.execute(sa.select(tables.groups)).all()) == []
    database.run_now(set_fact, A, 2)
    database.close()


def test_what_was_acknowledged_is_there_after_a_restart(tmp_path: Path) -> None:
    first = Database(tmp_path / "state.db")
    first.run_now(set_fact, A, {"b": [1, None, "é"]})
    second = Database(tmp_path / "state.db")  # the first was never closed, as after kill -9
    assert second.run_now(get_fact, A) == {"b": [1, None, "é"]}
    first.close()
    second.close()


def test_every_connection_is_durable_and_has_room_for_a_batch(tmp_path: Path) -> None:
    def pragmas(connection: sa.Connection) -> list[object]:
        names = ("journal_mode", "synchronous", "foreign_keys", "cache_size", "wal_autocheckpoint")
        return [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in names]

    full = 2
    with synced():
        database = Database(tmp_path / "state.db")
        assert database.run_now(pragmas) == ["wal", full, 1, -16_384, 4_000]
        database.close()


@pytest.mark.asyncio
async def test_effects_of_many_tasks_follow_each_other(tmp_path: Path) -> None:
    database = Database(tmp_path / "state.db")

    def increment(connection: sa.Connection) -> None:
        set_fact(connection, N, get_fact(connection, N) + 1)

    async with asyncio.TaskGroup() as group:
        for _ in range(30):
            group.create_task(database.run(increment))
    assert await database.run(get_fact, N) == 30
    database.close()


class Waiting:
    """A store whose writer is held at a first effect, while others line up."""

    def __init__(self, folder: Path) -> None:
        self.database = Database(folder / "state.db")
        self._free = threading.Event()
        self.commits: list[object] = []

    async def hold(self) -> asyncio.Task[bool]:
        begun = threading.Event()

        def waits(_connection: sa.Connection) -> bool:
            begun.set()
            return self._free.wait(30)

        held = asyncio.create_task(self.database.run(waits))
        await asyncio.to_thread(begun.wait)
        return held

    async def release(self) -> None:
        """Let the line go on, once everybody is in it."""
        await asyncio.sleep(0)
        sa.event.listen(self.database._engine, "before_cursor_execute", self._note)
        self._free.set()

    def _note(self, _connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        if statement == "COMMIT":
            self.commits.append(statement)


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Waiting]:
    made = Waiting(tmp_path)
    yield made
    made.database.close()


def put(connection: sa.Connection, name: str) -> str:
    if name == "bad":
        set_fact(connection, HALF, 1)
        raise KeyError(name)
    set_fact(connection, Fact[Any](name, None), True)
    return name


@pytest.mark.asyncio
async def test_effects_that_wait_share_a_commit_and_one_that_fails_leaves_the_others_alone(waiting: Waiting) -> None:
    await waiting.hold()
    names = ["a", "bad", "b", "c"]
    tasks = [asyncio.create_task(waiting.database.run_for_node(put, name)) for name in names]
    await waiting.release()
    a, bad, *rest = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(bad, KeyError)
    assert [a, *rest] == ["a", "b", "c"]
    assert len(waiting.commits) == 2  # of what was held, and of the four
    assert [waiting.database.run_now(get_fact, Fact[Any](name, None)) for name in (*names, "half")] == [
        True,
        None,
        True,
        True,
        None,
    ]


def following(name: str) -> FollowingEffect[str]:
    return FollowingEffect(lambda connection: put(connection, name), asyncio.get_running_loop().create_future())


@pytest.mark.asyncio
async def test_effects_share_the_commit_of_the_one_that_they_follow_and_cannot_undo_it(waiting: Waiting) -> None:
    await waiting.release()
    bad, gone, good = following("bad"), following("gone"), following("good")
    gone.answer.cancel()
    assert await waiting.database.run_followed(lambda connection: put(connection, "a"), [bad, gone, good]) == "a"
    assert (await good.answer, len(waiting.commits)) == ("good", 1)
    with pytest.raises(KeyError):
        await bad.answer
    facts = [waiting.database.run_now(get_fact, Fact[Any](name, None)) for name in ("a", "half", "gone", "good")]
    assert facts == [True, None, None, True]


@pytest.mark.asyncio
async def test_nothing_follows_an_effect_that_fails_is_refused_or_has_lost_its_caller(waiting: Waiting) -> None:
    followers = [following(name) for name in ("a", "b", "c")]
    await waiting.hold()
    fails = asyncio.create_task(waiting.database.run_followed(lambda conn: put(conn, "bad"), followers[:1]))
    leaves = asyncio.create_task(waiting.database.run_followed(lambda conn: put(conn, "gone"), followers[1:2]))
    await asyncio.sleep(0)
    leaves.cancel()
    others = [asyncio.create_task(waiting.database.run_for_node(put, "d")) for _ in range(WAITING_MAX)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await waiting.database.run_followed(lambda conn: put(conn, "e"), followers[2:])
    await waiting.release()
    await asyncio.gather(fails, *others, return_exceptions=True)
    assert [await follower.answer for follower in followers] == [None] * 3
    assert [waiting.database.run_now(get_fact, Fact[Any](name, None)) for name in "abce"] == [None] * 4


@pytest.mark.asyncio
async def test_nobody_in_a_group_is_told_of_success_before_the_commit(waiting: Waiting) -> None:
    def poison(connection: sa.Connection) -> None:
        """Fail as with a full disk: the transaction is lost, and with it the others' work."""
        connection.exec_driver_sql("ROLLBACK")

    await waiting.hold()
    tasks = [
        asyncio.create_task(waiting.database.run_for_node(put, "a")),
        asyncio.create_task(waiting.database.run_for_node(poison)),
    ]
    await waiting.release()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [sa.exc.OperationalError] * 2
    assert waiting.database.run_now(get_fact, A) is None
    assert await waiting.database.run(put, "after") == "after"


@pytest.mark.asyncio
async def test_the_operator_passes_the_line_of_nodes_and_is_never_refused(waiting: Waiting) -> None:
    done: list[str] = []

    def note(_connection: sa.Connection, who: str) -> None:
        done.append(who)

    await waiting.hold()
    nodes = [asyncio.create_task(waiting.database.run_for_node(note, "node")) for _ in range(WAITING_MAX)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await waiting.database.run_for_node(note, "one too many")
    operator = asyncio.create_task(waiting.database.run(note, "operator"))
    await waiting.release()
    await asyncio.gather(operator, *nodes)
    assert done == ["operator"] + ["node"] * WAITING_MAX
    await waiting.database.run_for_node(note, "there is room again")


@pytest.mark.asyncio
async def test_what_a_client_asked_for_that_hung_up_in_the_line_is_not_done(waiting: Waiting) -> None:
    await waiting.hold()
    gone = asyncio.create_task(waiting.database.run_for_node(put, "gone"))
    await asyncio.sleep(0)
    gone.cancel()
    stays = asyncio.create_task(waiting.database.run_for_node(put, "stays"))
    await waiting.release()
    assert await stays == "stays"
    assert waiting.database.run_now(get_fact, GONE) is None


@pytest.mark.asyncio
async def test_strangers_cannot_make_reads_pile_up(waiting: Waiting) -> None:
    ended = threading.Event()
    reads = [asyncio.create_task(waiting.database.read(lambda _: ended.wait(30))) for _ in range(READS_WAITING_MAX)]
    await asyncio.sleep(0)
    try:
        with pytest.raises(Overloaded):
            await waiting.database.read(get_fact, A)
    finally:
        ended.set()
    await asyncio.gather(*reads)
    assert await waiting.database.read(get_fact, A) is None


def test_a_fact_that_was_never_set_has_its_default(tmp_path: Path) -> None:
    database = Database(tmp_path / "state.db")
    assert database.run_now(get_fact, NOTHING) == 7
    database.run_now(set_fact, NOTHING, False)
    assert database.run_now(get_fact, NOTHING) is False
    database.close()


def test_a_long_read_does_not_hold_up_the_writer_and_sees_one_moment(tmp_path: Path) -> None:
    database = Database(tmp_path / "state.db")
    database.run_now(set_fact, A, 1)
    begun, ended = threading.Event(), threading.Event()

    def looks_twice(connection: sa.Connection) -> tuple[int, int]:
        before = get_fact(connection, A)
        begun.set()
        ended.wait()
        return before, get_fact(connection, A)

    async def both() -> tuple[int, int]:
        reading = asyncio.create_task(database.read(looks_twice))
        await asyncio.to_thread(begun.wait)
        try:
            async with asyncio.timeout(30):
                await database.run(set_fact, A, 2)
        finally:
            ended.set()
        assert await database.read(get_fact, A) == 2
        return await reading

    assert asyncio.run(both()) == (1, 1)
    database.close()


def test_what_is_called_as_a_read_cannot_write_and_the_next_writer_can(tmp_path: Path) -> None:
    database = Database(tmp_path / "state.db")
    with pytest.raises(sa.exc.OperationalError, match="readonly"):
        asyncio.run(database.read(set_fact, A, 1))
    database.run_now(set_fact, A, 2)
    assert asyncio.run(database.read(get_fact, A)) == 2
    database.close()


@contextmanager
def full_disk() -> Iterator[None]:
    """Make writes to files fail in this process, as with a full disk for temporary files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_next_writer_can_write_after_a_read_that_the_disk_failed(tmp_path: Path) -> None:
    """SQLite has ended the transaction by itself then, and refuses to be told so again."""
    database = Database(tmp_path / "state.db")
    database.run_now(set_fact, A, 1)
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 300000)"

    def spills(connection: sa.Connection) -> None:
        """More than its cache to sort, so that it needs a file."""
        assert get_fact(connection, A) == 1
        connection.exec_driver_sql(f"{numbers} SELECT name, randomblob(100) AS b FROM n, facts ORDER BY b").first()

    with full_disk(), pytest.raises(sa.exc.OperationalError, match=r"disk I/O error|full"):
        asyncio.run(database.read(spills))
    database.run_now(set_fact, A, 2)
    assert asyncio.run(database.read(get_fact, A)) == 2
    database.close()


def test_a_read_that_refuses_keeps_its_connection(tmp_path: Path) -> None:
    """Else strangers could have the store connected to anew for each of their mistakes."""
    database, made = Database(tmp_path / "state.db"), list[object]()
    sa.event.listen(database._engine, "connect", lambda connection, _record: made.append(connection))

    def refuses(_connection: sa.Connection) -> None:
        raise KeyError

    for _ in range(3):
        with pytest.raises(KeyError):
            asyncio.run(database.read(refuses))
    assert len(made) <= 1
    database.close()
