"""The usage of API keys by day: what is counted, on which day, and in which transaction."""

from datetime import date
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from coordinator.config import AuditSection
from coordinator.store import tables
from coordinator.transactions import api_keys, checked_rollouts, claims, queries
from protocol.limits import DAY_MS
from protocol.wire.signing import NodeKey
from protocol.work.lease import Lease
from tests.coordinator.transactions.test_queries import ask, asked_in, new_key, respond, shown
from tests.coordinator.world import World


def days_of(world: World, name: str | None = "someone", days: int = 30) -> list[tuple[int, ...]]:
    """The days of a key, or of all: how many days ago, answered queries, tokens in and out, and micro-units."""
    keys = {row["name"]: row["number"] for row in world.rows(tables.api_keys)}
    number = keys[name] if name else None
    today = date.fromordinal(date(1970, 1, 1).toordinal() + world.now_ms // DAY_MS)
    return [
        ((today - date.fromisoformat(row["day"])).days, *list(row.values())[1:])
        for row in world.run(api_keys.list_days, days, api_key=number, now_ms=world.now_ms)
    ]


def answered(world: World, node: NodeKey, key: str) -> Lease:
    """Ask a query, and have it answered with two tokens."""
    ask(world, key)
    (lease,) = asked_in(world.offer(node).leases)
    assert world.submit(node, respond(node, lease)).outcome == "accepted"
    return lease


def test_each_day_of_a_key_counts_its_answers_and_their_tokens_in_and_out(world: World) -> None:
    node, one, other = world.join(1), new_key(world, "one"), new_key(world, "other")
    world.now_ms += DAY_MS - world.now_ms % DAY_MS - 1
    answered(world, node, one)
    world.now_ms += 1  # midnight, UTC
    for key in (one, one, other):
        answered(world, node, key)
    assert days_of(world, "one") == [(1, 1, 2, 2, 2), (0, 2, 4, 4, 4)]
    assert days_of(world, "other") == [(0, 1, 2, 2, 2)]
    assert days_of(world, None) == [(1, 1, 2, 2, 2), (0, 3, 6, 6, 6)]
    assert days_of(world, "one", days=1) == [(0, 2, 4, 4, 4)]
    shown_days = world.run(api_keys.usage_of, one, 1, now_ms=world.now_ms)["days"]
    assert [row["tokens"] for row in shown_days] == [4]
    world.now_ms += 29 * DAY_MS
    assert days_of(world, "one") == [(29, 2, 4, 4, 4)], "the last thirty days end today"
    assert days_of(world, "one", days=31)[0] == (30, 1, 2, 2, 2)
    for name in ("one", "other"):
        listed = shown(world, name)
        assert [sum(day[place] for day in days_of(world, name, days=40)) for place in (1, 3, 4)] == [
            listed["answered_queries"], listed["tokens"], listed["spent_micros"],
        ]  # fmt: skip


def test_an_answer_that_comes_twice_or_is_surplus_counts_once_on_its_day(world: World) -> None:
    node, key = world.join(1), new_key(world)
    lease = answered(world, node, key)
    assert world.submit(node, respond(node, lease)).outcome == "already_accepted"
    world.run(queries.record_answer, 1, (), world.now_ms + DAY_MS)
    assert days_of(world) == [(0, 1, 2, 2, 2)]
    (number,) = ask(world, key)
    world.run(queries.withdraw, [number], now_ms=world.now_ms)
    assert days_of(world) == [(0, 1, 2, 2, 2)], "a withdrawn query is no usage"


def test_a_refund_is_taken_off_the_day_of_the_answer(tmp_path: Path) -> None:
    world = World(tmp_path, rules=AuditSection())
    world.publish(1, 0)
    node, key = world.join(1), new_key(world)
    answered(world, node, key)
    world.now_ms += DAY_MS
    (claim_id,) = world.take_cases()
    assert world.find(claim_id, "hard")
    assert days_of(world) == [(1, 1, 0, 0, 0)], "it was answered, and is counted no more"
    assert (shown(world)["answered_queries"], shown(world)["tokens"], shown(world)["spent_micros"]) == (1, 0, 0)


def test_the_day_of_a_key_and_the_acceptance_of_its_answer_are_one_transaction(world: World) -> None:
    """No `kill -9` parts what a rollback undoes together."""
    node, key = world.join(1), new_key(world)
    ask(world, key)
    (lease,) = world.offer(node).leases
    read = checked_rollouts.read_rollouts(node.node_id, [respond(node, lease)])

    def accept(connection: sa.Connection) -> None:
        (verdict,) = claims.receive_rollouts(connection, node.node_id, read, judge=world.judge, now_ms=world.now_ms)
        assert verdict.outcome == "accepted"
        assert connection.execute(sa.select(tables.key_days.c.tokens)).scalars().all() == [2]
        raise InterruptedError

    with pytest.raises(InterruptedError):
        world.run(accept)
    assert (world.rows(tables.key_days), world.rows(tables.rollouts)) == ([], [])
    assert (shown(world)["spent_micros"], shown(world)["open_queries"]) == (0, 1)
    assert world.submit(node, respond(node, lease)).outcome == "accepted"
    assert days_of(world) == [(0, 1, 2, 2, 2)]


def plan_of_days(connection: sa.Connection, api_key: int | None) -> str:
    """SQLite's plan of the statement that reads the days of a key, or of all."""
    statements = list[tuple[str, Any]]()

    def hear(_connection: object, _cursor: object, text: str, given: Any, *_rest: object) -> None:
        statements.append((text, given))

    sa.event.listen(connection, "before_cursor_execute", hear)
    api_keys.list_days(connection, api_key=api_key, now_ms=10**12)
    sa.event.remove(connection, "before_cursor_execute", hear)
    ((text, given),) = statements
    rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", given).all()
    return "\n".join(row.detail for row in rows if "key_days" in row.detail)


def test_days_are_found_by_their_keys_without_those_of_all_years(world: World, store_url: str) -> None:
    """The plan is SQLite's: the primary key finds a caller's days, and those of all keys, one key after the other."""
    if store_url:
        return
    number = api_keys.KeyUsage(1, 2, 3, 4)
    for key in range(1, 201):
        new_key(world, f"key {key}")
        world.run(api_keys.record_day, key, number, world.now_ms)
        world.run(api_keys.record_day, key, number, world.now_ms - key * DAY_MS)
    found = world.run(api_keys.list_days, 30, api_key=7, now_ms=world.now_ms)
    assert [row["tokens"] for row in found] == [3, 3]
    assert world.run(api_keys.list_days, 1, now_ms=world.now_ms)[0]["answered_queries"] == 200
    for one in (7, None):
        assert "(api_key=? AND day>?)" in world.run(plan_of_days, one)
