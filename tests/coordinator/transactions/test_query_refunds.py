"""Answers that a key does not pay for: those that no caller has and that are void, and those that nobody will give."""

from pathlib import Path

import pytest
import sqlalchemy as sa

from coordinator.config import AuditSection
from coordinator.store import tables
from coordinator.store.facts import FINISHED, set_fact
from coordinator.transactions import queries
from protocol.errors import NotFound
from tests.coordinator.transactions.test_queries import ask, asked_in, new_key, respond, shown
from tests.coordinator.world import END, MAX_NEW, World, fragment

DAY_MS = 86_400_000


@pytest.mark.parametrize("has_part", [False, True], ids=["one node", "continued"])
def test_a_fault_in_the_answer_of_a_withdrawn_query_is_refunded(tmp_path: Path, has_part: bool) -> None:
    """The key was charged for it although no caller has it. What is void is paid to nobody."""
    world = World(tmp_path, rules=AuditSection())
    world.publish(1, 0)
    node, other, key = world.join(1), world.join(2), new_key(world)
    numbers = ask(world, key)
    (lease,) = asked_in(world.offer(node).leases)
    if has_part:
        assert world.tell(node, fragment(node, lease, {0: [72]})).taken
        world.give_back(node, lease)
        node = other
        (lease,) = asked_in(world.offer(node, continues=True).leases)
    world.run(queries.withdraw, numbers, now_ms=world.now_ms)
    assert world.submit(node, respond(node, lease, [73, END] if has_part else (72, END))).outcome == "accepted"
    assert shown(world)["spent_micros"] == (3 if has_part else 2)
    world.now_ms += DAY_MS
    for claim_id in world.take_cases():
        assert world.find(claim_id, "hard")
    assert (shown(world)["spent_micros"], shown(world)["reserved_micros"]) == (0, 0)
    assert sum(row["spent_micros"] for row in world.rows(tables.key_days)) == 0


@pytest.mark.parametrize(("left_micros", "refunded"), [(1, (2, MAX_NEW)), (0, (0, MAX_NEW - 2))])
def test_of_two_answers_that_cost_more_than_was_reserved_only_what_is_certain_is_refunded(
    world: World, left_micros: int, refunded: tuple[int, int]
) -> None:
    one, two, key = world.join(1), world.join(2), new_key(world)
    numbers = ask(world, key)
    (first,) = asked_in(world.offer(one).leases)
    on_trial = sa.update(tables.groups).where(tables.groups.c.split == "query").values(state="trial")
    world.run(lambda connection: connection.execute(on_trial))
    (second,) = asked_in(world.offer(two).leases)
    world.run(queries.withdraw, numbers, now_ms=world.now_ms)
    world.submit(one, respond(one, first))
    world.submit(two, respond(two, second, (72,) * MAX_NEW, "length"))
    spent = shown(world)["spent_micros"]
    left = sa.update(tables.queries).values(reserved_micros=left_micros)
    world.run(lambda connection: connection.execute(left))
    claims = {row["node_id"]: row["claim_id"] for row in world.rows(tables.rollouts)}
    for node, micros in zip((one, two), refunded, strict=True):
        world.run(queries.refund_void, [claims[node.node_id]])
        spent -= micros
        assert shown(world)["spent_micros"] == spent


def test_a_finished_round_refuses_queries_at_once(world: World) -> None:
    """Nobody would answer: its nodes end."""
    key = new_key(world)
    world.run(set_fact, FINISHED, True)
    with pytest.raises(NotFound, match="finished"):
        ask(world, key)
    assert shown(world)["reserved_micros"] == 0
