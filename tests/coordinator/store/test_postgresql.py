"""A round on PostgreSQL: the whole way over HTTP, writers that follow each other, and stores that cannot be used."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from coordinator.service.round import Round
from coordinator.store.facts import Fact, get_fact, set_fact
from coordinator.store.state import Database, engine
from ledger import store
from ledger.prepared import STRAIGHT, say
from protocol.errors import ConfigInvalid, MalformedMessage
from protocol.wire import canonical
from protocol.work.messages import (
    Fetched,
    FetchPlan,
    Heartbeat,
    HeartbeatReply,
    PeerUpload,
    PlanRequest,
    Reached,
    Register,
    Transfer,
    TransferReceipt,
)
from tests.coordinator.served import serve
from tests.coordinator.world import clear
from tests.ledger import test_prepared

A = Fact[Any]("a", None)
N = Fact("n", 0)

ADDRESSES = ("/v1/status", "/v1/leaderboard", "/v1/broadcast", "/healthz", "/v1/ledger/checkpoint")


@pytest.mark.asyncio
async def test_every_address_works_on_postgresql_as_on_sqlite(tmp_path: Path, postgres_url: str) -> None:
    clear(postgres_url)
    async with serve(tmp_path, f"store.url={postgres_url}") as served:
        await served.publish()
        sender, node = [await served.join(number) for number in (1, 2)]
        beat = Heartbeat(
            session="0" * 16,
            version=1,
            phase="generating",
            tokens_per_s=2.5,
            transfer=Transfer(from_peers=1, from_seeder=2, from_http=3, to_peers=4),
            blames=(),
            reached=(Reached(version=1, stage="first_token", ago_s=0.5),),
        )
        receipt = TransferReceipt(
            round_id=served.round.round_id,
            version=1,
            seconds=1.5,
            uploads=(PeerUpload(peer_id=sender.node_id, size_bytes=7, busy_s=0.5),),
            answered=(sender.node_id,),
            unanswered=(),
            missed_probe=None,
            from_origins=0,
        )
        await served.publish(2, b"other weights")
        for key in (sender, node, node):
            await served.call(key, "/v1/heartbeat", beat, HeartbeatReply)
        sealed = node.seal("receipt", receipt.to_bytes())
        await served.call(node, "/v1/fetched", Fetched(receipt=sealed), HeartbeatReply)
        await served.call(node, "/v1/plan", PlanRequest(version=2), FetchPlan)
        (lease,) = await served.lease(node)
        (verdict,) = await served.submit(node, served.answer(node, lease))
        assert verdict.outcome == "accepted"
        await served.round.publish_checkpoint()
        for address in ADDRESSES:
            response = await served.client.get(address)
            assert response.status == 200, (address, await response.text())
        board = await (await served.client.get("/v1/leaderboard")).json()
        assert [row["pending_micros"] for row in board["nodes"]] == [verdict.credit_micros, 0]
        assert served.round.database.run_now(store.rebuild) == []


@pytest.mark.asyncio
async def test_a_nul_that_postgresql_cannot_keep_is_refused_by_name(tmp_path: Path, postgres_url: str) -> None:
    clear(postgres_url)
    async with serve(tmp_path, f"store.url={postgres_url}") as served:
        await served.publish()
        node = await served.join()
        nul_name = Register.model_construct(name="a\0b", price_micros_per_mtok=1, addresses=(), shares=False, agent="")
        response = await served.post("/v1/nodes", served.sealed(node, "/v1/nodes", nul_name))
        assert response.status == MalformedMessage.http_status
        (verdict,) = await served.submit(node, node.seal("rollout", canonical.encode({"\0": 1})))
        assert (verdict.outcome, verdict.code) == ("rejected", MalformedMessage.code)


@pytest.mark.asyncio
async def test_two_processes_lose_no_update_to_each_other(postgres_url: str) -> None:
    clear(postgres_url)
    both = [Database(postgres_url) for _ in range(2)]

    def increment(connection: sa.Connection) -> None:
        set_fact(connection, N, get_fact(connection, N) + 1)

    await asyncio.gather(*(database.run_for_node(increment) for _ in range(20) for database in both))
    assert await both[0].read(get_fact, N) == 40
    for database in both:
        database.close()


def test_a_writer_waits_for_the_one_of_another_process(postgres_url: str) -> None:
    clear(postgres_url)
    one, other = (Database(postgres_url) for _ in range(2))
    begun, free, seen = threading.Event(), threading.Event(), list[object]()

    def slow(connection: sa.Connection) -> None:
        begun.set()
        free.wait(30)
        set_fact(connection, A, 1)

    threads = [
        threading.Thread(target=lambda: one.run_now(slow)),
        threading.Thread(target=lambda: seen.append(other.run_now(get_fact, A))),
    ]
    threads[0].start()
    begun.wait(30)
    threads[1].start()
    assert not seen
    free.set()
    for thread in threads:
        thread.join(30)
    assert seen == [1]
    one.close()
    other.close()


@pytest.mark.asyncio
async def test_a_commit_waits_for_the_disk_whatever_the_role_is_set_to(postgres_url: str) -> None:
    database = Database(postgres_url)
    setting = database.run_now(lambda connection: connection.exec_driver_sql("SHOW synchronous_commit").scalar())
    assert setting == "on"
    database.close()


@pytest.mark.asyncio
async def test_writers_see_what_was_written_while_they_waited_whatever_the_role_is_set_to(postgres_url: str) -> None:
    """A stricter level gives a writer a view from before it had the lock, and its write fails."""
    clear(postgres_url)
    with one_connection(postgres_url) as connection:
        connection.exec_driver_sql("ALTER ROLE CURRENT_USER SET default_transaction_isolation = 'repeatable read'")
    both = [Database(postgres_url) for _ in range(2)]

    def increment(connection: sa.Connection) -> None:
        set_fact(connection, N, get_fact(connection, N) + 1)

    try:
        both[0].run_now(increment)
        await asyncio.gather(*(database.run(increment) for _ in range(20) for database in both))
        assert both[0].run_now(get_fact, N) == 41
    finally:
        for database in both:
            database.close()
        with one_connection(postgres_url) as connection:
            connection.exec_driver_sql("ALTER ROLE CURRENT_USER RESET default_transaction_isolation")


@contextmanager
def one_connection(url: str) -> Iterator[sa.Connection]:
    made = engine(url)
    with made.connect() as connection:
        yield connection
    made.dispose()


@pytest.mark.asyncio
async def test_a_second_round_cannot_use_the_store_of_the_first(tmp_path: Path, postgres_url: str) -> None:
    clear(postgres_url)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    async with serve(tmp_path / "first", f"store.url={postgres_url}"):
        with pytest.raises(ConfigInvalid, match="belongs to round"):
            async with serve(tmp_path / "second", f"store.url={postgres_url}"):
                pass


def test_a_round_cannot_change_its_store(tmp_path: Path, postgres_url: str) -> None:
    async def open_twice() -> None:
        async with serve(tmp_path):
            pass
        with pytest.raises(ConfigInvalid, match=r"store\.url"):
            async with serve(tmp_path, f"store.url={postgres_url}"):
                pass

    asyncio.run(open_twice())


@pytest.mark.parametrize("url", ["postgresql://nobody@/none?host=/nowhere", "postgresql://[", "postgresql://u@h:x/d"])
def test_a_store_that_does_not_answer_is_named_and_no_traceback(url: str) -> None:
    with pytest.raises(ConfigInvalid, match=r"store\.url cannot be used"):
        Database(url)


def test_a_round_on_sqlite_has_one_process(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="There is no round"):
        Round.beside(tmp_path)

    async def open_one() -> None:
        async with serve(tmp_path):
            pass

    asyncio.run(open_one())
    with pytest.raises(ConfigInvalid, match="served by one process"):
        Round.beside(tmp_path / "round")


def test_statements_that_go_past_the_cursors_say_the_same_as_sqlalchemy(postgres_url: str) -> None:
    with one_connection(postgres_url) as connection:
        for number, same in enumerate(test_prepared.SAME):
            connection.exec_driver_sql("BEGIN")
            test_prepared.metadata.create_all(connection)
            same(connection)
            say(connection, "ROLLBACK")
            assert STRAIGHT in connection.info, number


def test_a_connection_whose_statements_were_thrown_away_prepares_them_again(postgres_url: str) -> None:
    clear(postgres_url)
    database = Database(postgres_url)
    database.run_now(set_fact, N, 1)

    def throw_away(connection: sa.Connection) -> None:
        get_fact(connection, N)
        say(connection, "DEALLOCATE ALL")
        get_fact(connection, N)

    with pytest.raises(sa.exc.DBAPIError, match="does not exist"):
        database.run_now(throw_away)
    assert database.run_now(get_fact, N) == 1
    database.close()


def test_a_connection_that_is_lost_fails_its_effect_by_name_and_no_other(postgres_url: str) -> None:
    clear(postgres_url)
    database = Database(postgres_url)

    def lose(connection: sa.Connection) -> None:
        set_fact(connection, N, 1)
        with suppress(sa.exc.DBAPIError):
            say(connection, "SELECT pg_terminate_backend(pg_backend_pid())")
        get_fact(connection, N)

    with pytest.raises(sa.exc.DBAPIError, match="the connection is lost"):
        database.run_now(lose)
    assert database.run_now(get_fact, N) == 0
    database.close()
