"""Cost of a long history: requests for work do not get slower, counted in steps of SQLite, not in time."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from coordinator.store import tables
from coordinator.transactions import offers, standings, stragglers, tally
from protocol.ids import NodeId
from protocol.work.messages import LeaseRequest
from tests.coordinator.world import NOW_MS, World

HISTORY = 5_000
STEP = 50


@pytest.mark.parametrize(
    "ask",
    [
        lambda connection, _: standings.share_of(connection, 100, 0.25, proven_only=True),
        lambda connection, node: standings.at_work(connection, standings.owner_of(connection, node)),
        lambda connection, node: stragglers.late_groups(connection, node, size=2, bound=1, now_ms=NOW_MS),
    ],
    ids=["share", "at work", "late groups"],
)
def test_a_question_of_every_lease_takes_no_longer_after_thousands(
    world: World, ask: Callable[[sa.Connection, NodeId], Any]
) -> None:
    keys = [world.join(number) for number in (1, 2, 3)]
    for key in keys:
        world.earn(key)
    world.train(1)
    world.lease(keys[0])
    before = world.run(steps, ask, keys[0].node_id)
    world.run(lengthen, keys[0].node_id)
    assert world.run(steps, ask, keys[0].node_id) <= 2 * before + STEP


def test_an_offer_takes_no_longer_while_thousands_are_out(world: World) -> None:
    world.terms = replace(world.terms, staleness=HISTORY, max_owner_share=0.25, timeout_ms=10**9)
    keys = [world.join(number) for number in range(1, 21)]
    ask = LeaseRequest(version=1, groups=1)

    def one(connection: sa.Connection, node: NodeId) -> None:
        found = offers.offer(connection, node, ask, terms=world.terms, draw=world.draw, now_ms=world.now_ms)
        assert found.leases

    for key in keys:
        world.lease(key)
    before = world.run(steps, one, keys[0].node_id)
    world.run(give_away, [key.node_id for key in keys[1:]])
    assert world.run(steps, one, keys[0].node_id) <= 1.2 * before + STEP


def give_away(connection: sa.Connection, nodes: list[NodeId]) -> None:
    """Let these nodes have thousands of groups under way."""
    like = connection.execute(sa.select(tables.leases).limit(1)).mappings().one()
    group = connection.execute(sa.select(tables.groups).limit(1)).mappings().one()
    first = connection.execute(sa.select(sa.func.max(tables.groups.c.group_no))).scalar_one() + 1
    rows = [
        dict(like) | {"lease_id": f"out-{n}", "group_no": first + n, "node_id": nodes[n % len(nodes)]}
        for n in range(HISTORY)
    ]
    connection.execute(sa.insert(tables.groups), [dict(group) | {"group_no": first + n} for n in range(HISTORY)])
    connection.execute(sa.insert(tables.leases), rows)
    tally.recount(connection)


def steps(connection: sa.Connection, ask: Callable[[sa.Connection, NodeId], Any], node: NodeId) -> int:
    """Return SQLite's steps for an answer, in units of fifty instructions."""
    counted = 0

    def count() -> None:
        nonlocal counted
        counted += 1

    driver = connection.connection.driver_connection
    assert driver
    driver.set_progress_handler(count, STEP)
    ask(connection, node)
    driver.set_progress_handler(None, 0)
    return counted


def lengthen(connection: sa.Connection, node: NodeId) -> None:
    """Let the node have answered thousands of groups that were trained on."""
    for table in (tables.leases, tables.rollouts):
        like = connection.execute(sa.select(table).where(table.c.lease_id.in_(answered()))).mappings().one()
        fresh = [dict(like) | {"lease_id": f"old-{n}", "group_no": 1_000 + n, "node_id": node} for n in range(HISTORY)]
        if "claim_id" in like:
            fresh = [row | {"claim_id": f"old-{n}"} for n, row in enumerate(fresh)]
        connection.execute(sa.insert(table), fresh)


def answered() -> sa.Select[Any]:
    batched = tables.rollouts.c.state == "batched"
    return sa.select(tables.rollouts.c.lease_id).where(batched).order_by(tables.rollouts.c.lease_id).limit(1)
