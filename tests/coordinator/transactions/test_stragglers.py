"""Late groups go to a second node: seldom, to a fast one, at nobody's expense."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.store import tables
from coordinator.transactions import evaluations
from coordinator.transactions.stragglers import GroupAtWork, choose
from protocol.wire.signing import NodeKey
from protocol.work.lease import Lease
from tests.coordinator.world import HONEST_TOKENS, World, answer, fragment

LATELY: dict[str, Any] = {"missing": 1, "bound": 2, "typical_s": 10.0, "helper_s": 5.0, "now_s": 100.0}


@pytest.mark.parametrize(
    ("out", "changed", "chosen"),
    [
        (
            [GroupAtWork(1, 50), GroupAtWork(2, 10), GroupAtWork(3, 95)],
            {},
            [2, 1],
        ),  # the latest first, and not the one that is in time
        ([GroupAtWork(1, 85)], {}, []),  # 1.5 times as long is not yet late
        ([GroupAtWork(1, 50), GroupAtWork(2, 10)], {"missing": 3}, []),  # the batch lacks more than these
        ([GroupAtWork(1, 50)], {"missing": 0}, []),
        ([GroupAtWork(1, 50)], {"helper_s": 11.0}, []),
        ([GroupAtWork(1, 50, own=True)], {}, []),
        ([GroupAtWork(1, 50, 2), GroupAtWork(2, 50), GroupAtWork(3, 40)], {}, [3]),  # one of two is given twice already
        ([GroupAtWork(1, 50)], {"bound": 0, "missing": 0}, []),
    ],
)
def test_who_is_late_by_hand(out: list[GroupAtWork], changed: dict[str, int], chosen: list[int]) -> None:
    assert choose(out, **(LATELY | changed)) == chosen


@given(
    st.lists(st.builds(GroupAtWork, st.integers(0, 9), st.floats(0, 100), st.integers(1, 3), st.booleans())),
    st.integers(0, 4),
)
def test_never_more_than_the_bound_are_given_twice(out: list[GroupAtWork], bound: int) -> None:
    chosen = choose(out, **(LATELY | {"bound": bound}))
    assert sum(one.nodes > 1 for one in out) + len(chosen) <= max(bound, sum(one.nodes > 1 for one in out))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """S = 0, B = 2, where groups take 100 ms."""
    made = World(tmp_path, staleness=0, over_issue=1)
    made.publish(1, 0)
    for key in (made.join(1), made.join(2)):
        lease = made.lease(key)
        made.now_ms += 100
        made.submit(key, answer(key, lease))
    made.train(1)
    made.publish(2, 1)
    yield made
    made.database.close()


def late(world: World) -> tuple[NodeKey, Lease, NodeKey, Lease]:
    """A slow node with its lease, and a fast one with another of the same group."""
    slow, fast = world.join(1), world.join(2)
    lease = world.lease(slow, version=2)
    world.earn(fast, version=2)
    assert world.offer(fast, version=2).reason == "ahead"
    world.now_ms += 200
    again = world.lease(fast, version=2)
    assert again.prompt == lease.prompt
    assert again.seed != lease.seed
    assert world.offer(fast, version=2).reason == "ahead", "once is enough"
    return slow, lease, fast, again


def test_a_turn_that_waits_for_its_environment_is_no_group_that_the_learner_has(world: World) -> None:
    """A batch of two lacks both groups, more than may be given twice: one is late, one waits for its environment."""
    world.terms = replace(world.terms, turn_tokens_max=2)
    world.judge = replace(world.judge, terms=world.terms, reward=None)
    slow, fast = world.join(1), world.join(2)
    world.lease(slow, version=2)
    assert world.submit(fast, answer(fast, world.lease(fast, version=2))).outcome == "accepted"
    world.now_ms += 200
    assert world.offer(fast, version=2).reason == "ahead"


@pytest.mark.parametrize("first", ["slow", "fast"])
def test_the_first_answer_is_trained_on_and_the_second_is_paid_all_the_same(world: World, first: str) -> None:
    slow, lease, fast, again = late(world)
    pair = [(slow, lease), (fast, again)]
    winner, loser = pair if first == "slow" else pair[::-1]
    assert world.submit(winner[0], answer(*winner)).outcome == "accepted"
    assert len(world.train(2).groups) == 2
    world.publish(3, 2)  # S = 0: what was sampled from version 2 could not be trained on any more
    pending, payable = world.owed(loser[0].node_id)
    assert world.submit(loser[0], answer(*loser)).credit_micros == HONEST_TOKENS
    assert world.owed(loser[0].node_id) == (pending, payable + HONEST_TOKENS)
    assert sorted(row["state"] for row in world.rows(tables.rollouts)) == ["batched"] * 4 + ["surplus"]
    assert world.audit() == []


def test_the_version_of_an_answer_that_may_yet_come_second_is_kept_for_its_audit(world: World) -> None:
    slow, lease, fast, again = late(world)
    assert world.run(evaluations.oldest_needed) is None
    assert world.submit(fast, answer(fast, again)).outcome == "accepted"
    world.train(2)
    for number in range(3, 6):
        world.publish(number, number - 1)
    assert world.run(evaluations.oldest_needed) == 2
    assert world.submit(slow, answer(slow, lease)).outcome == "accepted"
    assert world.run(evaluations.oldest_needed) is None, "nothing is audited in this world"


def test_who_comes_second_is_told_to_stop_and_blamed_for_nothing(world: World) -> None:
    slow, lease, fast, again = late(world)
    world.submit(fast, answer(fast, again))
    before = {row["node_id"]: row["lease_allowance"] for row in world.rows(tables.nodes)}
    reply = world.tell(slow, fragment(slow, lease, {0: [11]}), held=[lease])
    assert (reply.gone, reply.taken) == ((lease.lease_id,), ())
    assert world.lease_states()[lease.lease_id] == "cancelled"
    assert {row["node_id"]: row["lease_allowance"] for row in world.rows(tables.nodes)} == before


@pytest.mark.parametrize("how", ["expires", "gives back"])
def test_a_second_lease_that_ends_unanswered_after_the_first_was_answered_is_cancelled(world: World, how: str) -> None:
    slow, lease, fast, again = late(world)
    world.submit(fast, answer(fast, again))
    if how == "expires":
        world.now_ms += world.terms.timeout_ms
        world.expire()
    else:
        world.give_back(slow, lease)
    assert world.lease_states()[lease.lease_id] == "cancelled"
    assert sorted(world.group_states().values()) == ["accepted", "accepted", "trained", "trained"]


def test_a_group_that_one_of_two_gives_up_stays_with_the_other(world: World) -> None:
    slow, lease, fast, again = late(world)
    world.give_back(slow, lease)
    assert sorted(world.group_states().values()) == ["accepted", "leased", "trained", "trained"]
    world.give_back(fast, again)
    assert sorted(world.group_states().values()) == ["accepted", "open", "trained", "trained"]


def test_a_cheat_who_comes_second_spoils_nothing(world: World) -> None:
    slow, lease, fast, again = late(world)
    world.submit(fast, answer(fast, again))
    assert world.submit(slow, answer(slow, lease, lease_digest="0" * 64)).code == "lease_mismatch"
    assert len(world.train(2).groups) == 2
    assert world.rejected() == {"lease_mismatch": 1}


def test_without_the_setting_nothing_is_given_twice(tmp_path: Path) -> None:
    world = World(tmp_path, staleness=0)
    world.publish(1, 0)
    slow, fast = world.join(1), world.join(2)
    world.prove(fast)
    world.lease(slow)
    world.earn(fast)
    world.now_ms += 900
    assert world.offer(fast).reason == "ahead"
    world.database.close()
