"""Batches: formed once, never too old, and every claim that waited is settled once."""

from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa

from coordinator.store import tables
from ledger import store
from protocol.errors import OutOfOrder
from protocol.policy.chunks import digest
from protocol.wire.signing import NodeKey, open_envelope
from protocol.work.learning import TrainingBatch
from protocol.work.rollout import unpack_tokens
from tests.coordinator.world import HONEST_TOKENS, World, answer


def filled(world: World, groups: int = 2) -> NodeKey:
    """A node whose answers fill a buffer."""
    key = world.join(1)
    for _ in range(groups):
        world.earn(key)
    return key


def prompts(batch: TrainingBatch | None) -> list[int]:
    """The group numbers of a batch."""
    assert batch is not None
    return [int(unpack_tokens(group.prompt)[0]) - 10 for group in batch.groups]


def test_a_batch_holds_what_the_nodes_signed_and_the_coordinator_judged(world: World) -> None:
    key = world.join(1)
    lease = world.lease(key)
    envelope = answer(key, lease)
    world.submit(key, envelope)
    world.earn(key)
    batch = world.batch(1)
    assert batch is not None
    group = batch.groups[0]
    assert group.claim_id == digest(open_envelope("rollout", envelope).payload)
    assert (group.prompt, group.policy_update) == (lease.prompt, 0)
    assert [unpack_tokens(sample.tokens).tolist() for sample in group.samples] == [[10, 1]] * 2
    assert [sample.reward for sample in group.samples] == [1.0, 1.0]
    assert np.allclose(np.frombuffer(group.samples[0].logprobs, "<f4"), [-0.5, -0.1])
    assert TrainingBatch.from_bytes(batch.to_bytes()) == batch


def test_a_batch_says_what_the_parts_of_its_rewards_are_and_how_many_broke_the_form(world: World) -> None:
    """The learner gets only whole rewards, and its boards show each function's share in them."""
    filled(world)
    parts = {"invalid": [1], "components": {"exact": [1.0, None], "format": [0.5, 0.0], "unknown": [None, None]}}
    world.run(lambda connection: connection.execute(sa.update(tables.rollouts).values(marks=parts)))
    batch = world.batch(1)
    assert batch is not None
    assert batch.rewards == {"invalid": 0.5, "component/exact": 1.0, "component/format": 0.25}
    assert TrainingBatch.from_bytes(batch.to_bytes()) == batch


def test_a_batch_is_not_formed_before_it_is_full(world: World) -> None:
    key = filled(world, 1)
    assert world.batch(1) is None
    assert world.rows(tables.batches) == []
    world.earn(key)
    assert prompts(world.batch(1)) == [0, 1]


def test_asking_again_gives_the_same_batch_even_after_a_restart(world: World) -> None:
    key = filled(world)
    first = world.batch(1)
    world.earn(key)
    world.earn(key)
    assert world.batch(1) == first
    world.reopen()
    assert world.batch(1) == first
    world.report(1)
    assert world.batch(1) == first
    assert prompts(world.batch(2)) == [2, 3]
    assert world.batch(1) == first


@pytest.mark.parametrize("number", [-1, 0, 3, 2**63])
def test_a_batch_out_of_order_is_refused(world: World, number: int) -> None:
    filled(world)
    world.batch(1)
    with pytest.raises(OutOfOrder):
        world.batch(number)


def test_no_group_is_trained_on_twice(world: World) -> None:
    filled(world, 6)
    trained = [group for number in (1, 2, 3) for group in prompts(world.train(number))]
    assert sorted(trained) == list(range(6))
    assert set(world.group_states().values()) == {"trained"}


def test_older_versions_go_first(world: World) -> None:
    key = world.join(1)
    world.publish(2, 1)
    world.earn(key, version=2)
    world.earn(key, version=1)
    world.earn(key, version=2)
    world.earn(key, version=1)
    assert prompts(world.batch(1)) == [1, 3]
    assert [row["max_staleness"] for row in world.rows(tables.batches)] == [0]


def test_a_report_posts_every_claim_of_its_batch_once(world: World) -> None:
    key = filled(world)
    world.batch(1)
    assert world.owed(key.node_id) == (2 * HONEST_TOKENS, 0)
    assert world.report(1)
    assert world.owed(key.node_id) == (0, 2 * HONEST_TOKENS)
    before = world.dump()
    assert not world.report(1)
    assert world.dump() == before


def test_made_up_log_probabilities_are_audited_and_not_paid(world: World) -> None:
    key, liar = world.join(1), world.join(2)
    world.earn(key)
    world.earn(liar)
    batch = world.batch(1)
    assert batch is not None
    budget = world.budget()
    world.report(1, mismatched=[batch.groups[1].claim_id])
    assert world.owed(key.node_id) == (0, HONEST_TOKENS)
    assert world.owed(liar.node_id) == (HONEST_TOKENS, 0)
    assert world.take_cases() == [batch.groups[1].claim_id]
    assert world.find(batch.groups[1].claim_id, "hard")
    assert world.owed(liar.node_id) == (0, 0)
    assert world.budget() == budget + HONEST_TOKENS
    assert world.audit() == []


def test_a_later_report_cannot_take_back_what_was_paid(world: World) -> None:
    key = filled(world)
    batch = world.train(1)
    assert not world.report(1, mismatched=[batch.groups[0].claim_id])
    assert world.owed(key.node_id) == (0, 2 * HONEST_TOKENS)


def test_a_report_voids_nothing_outside_its_batch(world: World) -> None:
    key = filled(world, 4)
    world.batch(1)
    second = world.batch(2)
    assert second is not None
    world.report(1, mismatched=[group.claim_id for group in second.groups])
    assert world.owed(key.node_id) == (2 * HONEST_TOKENS, 2 * HONEST_TOKENS)


def test_a_report_of_a_batch_that_was_never_formed_is_refused(world: World) -> None:
    filled(world)
    with pytest.raises(OutOfOrder):
        world.report(1)


def test_the_learners_time_is_summed_once_per_batch(world: World) -> None:
    filled(world, 4)
    for number in (1, 1, 2):
        world.batch(number)
        world.report(number)
    assert [(row["idle_s"], row["busy_s"]) for row in world.rows(tables.batches)] == [(1.0, 3.0)] * 2


def test_a_stale_group_never_enters_a_batch_but_is_paid_and_its_prompt_offered_again(world: World) -> None:
    """Admission never lets it come to this; a restart with a smaller S does."""
    key = filled(world, 3)
    world.train(1)
    world.publish(2, 1)
    world.tighten(0)
    assert world.batch(2) is None
    assert [row["state"] for row in world.rows(tables.rollouts)] == ["batched", "batched", "stale"]
    assert world.owed(key.node_id) == (0, 3 * HONEST_TOKENS)
    assert world.group_states() == {0: "trained", 1: "trained", 2: "open"}
    assert unpack_tokens(world.lease(key, version=2).prompt).tolist() == [12]


def test_a_smaller_bound_takes_effect_at_once(world: World) -> None:
    key = filled(world, 5)
    world.train(1)
    world.publish(2, 1)
    world.earn(key, version=2)
    world.tighten(0)
    assert world.batch(2) is None
    assert world.owed(key.node_id) == (HONEST_TOKENS, 5 * HONEST_TOKENS)  # two trained, three stale, one waiting
    assert sorted(world.group_states().values()) == ["accepted", "open", "open", "open", "trained", "trained"]
    world.earn(key, version=2)
    assert world.batch(2) is not None
    assert [row["max_staleness"] for row in world.rows(tables.batches)] == [0, 0]
    assert world.audit() == []


def test_leftovers_are_paid_at_the_end_once(world: World) -> None:
    key = filled(world, 3)
    world.train(1)
    assert world.release_leftovers() == 1
    assert world.release_leftovers() == 0
    assert world.owed(key.node_id) == (0, 3 * HONEST_TOKENS)
    assert [row["state"] for row in world.rows(tables.rollouts)] == ["batched", "batched", "unused"]


def test_a_batch_that_waits_for_its_report_is_no_leftover(world: World) -> None:
    key = filled(world)
    world.batch(1)
    assert world.release_leftovers() == 0
    assert world.owed(key.node_id) == (2 * HONEST_TOKENS, 0)


def test_two_learners_get_one_batch(tmp_path: Path) -> None:
    """A learner that was thought dead and its successor ask at once."""
    world = World(tmp_path, size=1)
    world.publish(1, 0)
    key = filled(world, 2)
    assert world.batch(1) == world.batch(1)
    world.report(1)
    assert not world.report(1)
    kinds = [row.entry.kind for row in world.run(store.entries, 0, 100)]
    assert kinds == ["commitment", "commitment", "deposit", "version", "pending", "pending", "batch", "post"]
    assert world.owed(key.node_id) == (HONEST_TOKENS, HONEST_TOKENS)
    world.database.close()
