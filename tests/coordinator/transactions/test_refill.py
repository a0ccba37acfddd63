"""Groups whose samples all earned the same give their places to others: bounded, paid, and no learner starves."""

from collections import Counter
from dataclasses import replace

import pytest

from coordinator.config import parse
from coordinator.reports import summary
from coordinator.rules.selection import SelectionRules
from coordinator.store import tables
from protocol.wire.signing import NodeKey
from protocol.work.rollout import pack_tokens
from tests.coordinator.world import END, HONEST_TOKENS, World, answer, honest_sample

WRONG = pack_tokens([9, END])


def refilling(world: World, refill: float) -> NodeKey:
    world.terms = replace(world.terms, selection=SelectionRules(refill=refill))
    return world.join(1)


def mixed(world: World, key: NodeKey) -> None:
    """A group of which one sample is right."""
    lease = world.lease(key)
    right = honest_sample(lease)
    verdict = world.submit(key, answer(key, lease, samples=(right, right.model_copy(update={"tokens": WRONG}))))
    assert verdict.outcome == "accepted", verdict


def states(world: World) -> Counter[str]:
    return Counter(row["state"] for row in world.rows(tables.rollouts))


def test_it_is_off_unless_set(world: World) -> None:
    key = refilling(world, 0.0)
    world.earn(key)
    world.earn(key)
    world.train(1)
    assert states(world) == {"batched": 2}


def test_a_batch_is_full_of_groups_that_teach_something(world: World) -> None:
    key = refilling(world, 2.0)
    for _ in range(2):
        world.earn(key)
    mixed(world, key)
    assert world.batch(1) is None
    assert states(world) == {"alike": 2, "buffered": 1}
    mixed(world, key)
    batch = world.batch(1)
    assert batch is not None
    assert [[sample.reward for sample in group.samples] for group in batch.groups] == [[1.0, 0.0]] * 2


def test_their_places_are_given_to_others_and_they_are_paid(world: World) -> None:
    key = refilling(world, 1.0)
    room = 6
    for _ in range(room):
        world.earn(key)
    assert world.offer(key).reason == "ahead"
    world.batch(1)
    assert states(world) == {"alike": 2, "batched": 2, "buffered": 2}, "2 of 2 groups for the first batch"
    assert world.owed(key.node_id) == (4 * HONEST_TOKENS, 2 * HONEST_TOKENS)
    assert len(world.offer(key, groups=8).leases) == 2
    assert world.audit() == []


def test_no_more_are_replaced_than_so_many_for_each_batch(world: World) -> None:
    key = refilling(world, 0.5)
    for _ in range(6):
        world.earn(key)
    for number, alike in ((1, 1), (2, 2)):
        world.train(number)
        assert states(world)["alike"] == alike
    world.reopen()
    assert world.batch(2) is not None
    assert states(world)["alike"] == 2


def test_asking_again_sets_nothing_aside_for_a_batch_that_is_formed(world: World) -> None:
    key = refilling(world, 4.0)
    mixed(world, key)
    mixed(world, key)
    first = world.batch(1)
    world.earn(key)
    assert world.batch(1) == first
    assert states(world) == {"batched": 2, "buffered": 1}


def test_a_learner_that_waits_in_vain_takes_what_there_is(world: World) -> None:
    key = refilling(world, 4.0)
    mixed(world, key)
    world.earn(key)
    world.now_ms += world.terms.timeout_ms
    assert world.batch(1) is not None
    assert states(world) == {"batched": 2}


def test_status_counts_them(world: World) -> None:
    key = refilling(world, 1.0)
    world.earn(key)
    world.batch(1)
    found = world.run(summary.status, config=parse({}), alive_since_ms=0)
    assert found["rollouts"]["alike"] == 1


@pytest.mark.parametrize("refill", [0.0, 1.5])
def test_the_setting_reaches_the_terms(refill: float) -> None:
    from coordinator.transactions.leases import terms_of

    assert terms_of(parse({"selection": {"refill": refill}})).selection.refill == refill
