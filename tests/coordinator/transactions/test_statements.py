"""Statements of a lease and a rollout, counted instead of timed: a statement costs more than its rows."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import sqlalchemy as sa

from coordinator.config import AuditSection
from coordinator.store.tables import WAITS, audits
from coordinator.transactions import api_keys, checked_rollouts, claims, offers, queries
from coordinator.transactions.queries import Query
from protocol.wire.signing import NodeKey
from protocol.work.messages import LeaseRequest
from tests.coordinator import one_dialect
from tests.coordinator.world import PRICE, World, answer

LEASE, ROLLOUT = 21, 22
"""Statements, with what a round usually does: a look ahead, owners' shares, audits by lot."""

CALLS = 665
"""Calls of Python functions for an accepted rollout of eight samples."""

IDLE_CALLS, QUERY_CALLS, ANSWER_CALLS = 230, 340, 720
"""Calls for an offer of nothing to an idle node, of a query to it, and for the answer to the query."""

NODES = 6


@pytest.fixture
def usual(tmp_path: Path, store_url: str) -> Iterator[World]:
    """A round at work, with the settings of a usual one."""
    lottery = AuditSection(first_groups=1, floor=0.05, trusted_groups=2)
    made = World(tmp_path, staleness=100, size=4, lookahead=16, rules=lottery, problems=50, postgres_url=store_url)
    made.terms = replace(made.terms, samples_per_group=8, max_owner_share=0.5)
    made.judge = replace(made.judge, terms=made.terms)
    made.publish(1, 0)
    yield made
    made.database.close()


def at_work(world: World) -> list[NodeKey]:
    """Nodes that have earned, been audited and trained on."""
    keys = [world.join(number) for number in range(1, NODES + 1)]
    for number in range(1, 5):
        for key in keys:
            world.earn(key)
        for claim in world.take_cases():
            world.find(claim)
        world.train(number)
    return keys


def counted(world: World, effect: Callable[..., Any], *given: Any, **named: Any) -> tuple[Any, list[str]]:
    """Return the result of a call, and its statements."""

    def listening(connection: sa.Connection) -> tuple[Any, list[str]]:
        heard: list[str] = []

        @sa.event.listens_for(connection, "before_cursor_execute")
        def hear(_connection: object, _cursor: object, text: str, *_rest: object) -> None:
            heard.append(text)

        said = effect(connection, *given, **named, now_ms=world.now_ms)
        sa.event.remove(connection, "before_cursor_execute", hear)
        return said, heard

    found: tuple[Any, list[str]] = world.run(listening)
    return found


def test_a_lease_and_a_rollout_take_few_statements(usual: World) -> None:
    ask = LeaseRequest(version=1, groups=1)
    for key in at_work(usual):
        offered, statements = counted(usual, offers.offer, key.node_id, ask, terms=usual.terms, draw=usual.draw)
        assert len(statements) <= LEASE, "\n".join(statements)
        read = checked_rollouts.read_rollouts(key.node_id, [answer(key, offered.leases[0])])
        (verdict,), statements = counted(usual, claims.receive_rollouts, key.node_id, read, judge=usual.judge)
        assert verdict.outcome == "accepted"
        assert len(statements) <= ROLLOUT, "\n".join(statements)


def test_an_accepted_rollout_takes_few_calls(usual: World, store_url: str) -> None:
    """The count is for SQLite: PostgreSQL's driver makes calls of its own."""
    if store_url:
        return
    key = at_work(usual)[0]
    envelope = answer(key, usual.lease(key))
    calls: Counter[str] = Counter()

    def submit(connection: sa.Connection) -> Any:
        sys.setprofile(counting(calls))
        try:
            read = checked_rollouts.read_rollouts(key.node_id, [envelope])
            return claims.receive_rollouts(connection, key.node_id, read, judge=usual.judge, now_ms=usual.now_ms)[0]
        finally:
            sys.setprofile(None)

    assert usual.run(submit).outcome == "accepted"
    assert calls["call"] <= CALLS, calls


def test_an_idle_node_and_the_answer_to_a_query_take_few_calls(usual: World, store_url: str) -> None:
    """Both run while callers of the endpoint wait."""
    if store_url:
        return
    key = at_work(usual)[0]
    usual.terms = replace(usual.terms, over_issue=2, trains=False)
    ask = LeaseRequest(version=1, groups=1)

    def offer(connection: sa.Connection) -> Any:
        return offers.offer(connection, key.node_id, ask, terms=usual.terms, draw=usual.draw, now_ms=usual.now_ms)

    nothing, calls = usual.run(lambda connection: with_calls(offer, connection))
    assert nothing.reason == "ahead"
    assert calls <= IDLE_CALLS
    usual.run(queries_of_one, usual)
    offered, calls = usual.run(lambda connection: with_calls(offer, connection))
    assert calls <= QUERY_CALLS
    envelope = answer(key, offered.leases[0])

    def submit(connection: sa.Connection) -> Any:
        read = checked_rollouts.read_rollouts(key.node_id, [envelope])
        return claims.receive_rollouts(connection, key.node_id, read, judge=usual.judge, now_ms=usual.now_ms)[0]

    verdict, calls = usual.run(lambda connection: with_calls(submit, connection))
    assert verdict.outcome == "accepted"
    assert calls <= ANSWER_CALLS


def queries_of_one(connection: sa.Connection, world: World) -> None:
    """Record a query of a new key."""
    key = api_keys.make(connection, "caller", 10**6, now_ms=world.now_ms)
    asked = [Query((70, 71), samples=1, tokens_max=8)]
    queries.ask(connection, key, asked, terms=world.terms, dearest_price=PRICE, patience_ms=1000, now_ms=world.now_ms)


def counting(calls: Counter[str]) -> Callable[[FrameType, str, Any], None]:
    """Return a function that counts calls, but for those of the dialects that tests alone have."""

    def count(frame: FrameType, what: str, _: Any) -> None:
        if frame.f_code.co_filename != one_dialect.__file__:
            calls[what] += 1

    return count


def with_calls(effect: Callable[[sa.Connection], Any], connection: sa.Connection) -> tuple[Any, int]:
    """Run an effect, and again after its statements were built; return the outcome and the calls of the second run."""
    calls: Counter[str] = Counter()
    connection.exec_driver_sql("SAVEPOINT first")
    effect(connection)
    connection.exec_driver_sql("ROLLBACK TO SAVEPOINT first")
    sys.setprofile(counting(calls))
    try:
        return effect(connection), calls["call"]
    finally:
        sys.setprofile(None)


def test_no_value_decides_on_an_index_of_sqlite() -> None:
    """SQLite would compile a statement anew whenever it is given that value."""
    assert sa.select(audits.c.claim_id).where(WAITS).compile().params == {}


def test_what_a_savepoint_would_bring_back_stays_in_memory(tmp_path: Path) -> None:
    """Else every acceptance writes it to a temporary file."""
    world = World(tmp_path)
    assert world.run(lambda connection: connection.exec_driver_sql("PRAGMA temp_store").scalar()) == 2
    world.database.close()
