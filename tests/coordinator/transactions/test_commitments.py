"""The learner's commitments in the store: once each, in one chain, and against the batch that was formed."""

from typing import Any

import pytest

from coordinator.transactions import commitments
from ledger import store
from ledger.entry import FormedBatch, UpdateEntry
from ledger.training import LATER, TrainingChain, groups_root, is_drawn
from protocol.errors import OutOfOrder
from protocol.policy.chunks import digest
from protocol.wire.signing import open_envelope
from protocol.work.learning import UpdateCommitment
from tests.coordinator.world import World


def commit(world: World, update: int, before: str, after: str, **change: Any) -> bool:
    fields = {
        "update": update,
        "before": before * 64,
        "after": after * 64,
        "groups_root": "b" * 64,
        "settings": b"{}",
        "seed": 0,
        "steps": update,
    }
    message = UpdateCommitment.model_validate(fields | change)
    return world.database.run_now(commitments.record, message, now_ms=world.now_ms)


def entries(world: World) -> list[UpdateEntry]:
    recorded = world.database.run_now(store.entries, 0, 1000)
    return [each.entry for each in recorded if isinstance(each.entry, UpdateEntry)]


def test_a_learner_that_repeats_itself_changes_nothing(world: World) -> None:
    assert commit(world, 1, "1", "2")
    assert commit(world, 2, "2", "3")
    assert not commit(world, 1, "1", "2")
    assert not commit(world, 2, "2", "3")
    assert [(entry.update, entry.attempt) for entry in entries(world)] == [(1, 1), (2, 1)]


def test_another_result_of_an_update_is_another_attempt(world: World) -> None:
    for update, before, after in ((1, "1", "2"), (2, "2", "3"), (1, "1", "4"), (2, "4", "5"), (3, "5", "6")):
        assert commit(world, update, before, after)
    made = TrainingChain()
    for index, entry in enumerate(entries(world)):
        made.add(index, entry)
    assert made.summary.repeated == 2


@pytest.mark.parametrize(
    ("update", "before", "change"),
    [(3, "3", {}), (2, "9", {}), (2, "9", {"replaced_by": 2})],
    ids=["skipped", "weights from elsewhere", "a version that was never published"],
)
def test_what_readers_would_refuse_is_not_recorded(
    update: int, before: str, change: dict[str, int], world: World
) -> None:
    commit(world, 1, "1", "2")
    with pytest.raises(OutOfOrder, match=f"Update {update} does not continue the ledger"):
        commit(world, update, before, "3", **change)
    assert len(entries(world)) == 1


def test_a_batch_is_logged_when_it_is_formed_and_binds_the_update(world: World) -> None:
    key = world.join(1)
    world.earn(key)
    world.earn(key)
    batch = world.batch(1)
    assert batch is not None
    root = groups_root(group.to_bytes() for group in batch.groups)
    logged = [one.entry for one in world.database.run_now(store.entries, 0, 1000) if one.entry.kind == "batch"]
    assert logged == [FormedBatch(number=1, groups=2, groups_root=root)]
    assert world.batch(1) == batch
    altered = batch.groups[0].samples[0].model_copy(update={"reward": 9.0})
    cheat = batch.groups[0].model_copy(update={"samples": (altered, *batch.groups[0].samples[1:])})
    for groups in ([cheat, batch.groups[1]], batch.groups[:1], [*batch.groups, batch.groups[0]]):
        with pytest.raises(OutOfOrder, match="groups or rewards were changed"):
            commit(world, 1, "1", "2", groups_root=groups_root(group.to_bytes() for group in groups))
    assert commit(world, 1, "1", "2", groups_root=root)


def test_settings_are_found_by_their_digest(world: World) -> None:
    commit(world, 1, "1", "2", settings=b'{"learning_rate":1}')
    (entry,) = entries(world)
    assert world.database.run_now(commitments.settings, entry.settings_digest) == '{"learning_rate":1}'
    assert world.database.run_now(commitments.settings, "0" * 64) is None


def test_updates_are_drawn_once_the_batch_after_next_is_formed_as_readers_draw_them(world: World) -> None:
    key = world.join(1)
    chain = TrainingChain()
    for number in range(1, 6):
        for _ in range(2):
            world.earn(key, version=number)
        batch = world.batch(number)
        assert batch is not None
        root = groups_root(group.to_bytes() for group in batch.groups)
        promise = b'{"kept_one_in":%d}' % (1 if number < 3 else 2)
        assert commit(world, number, str(number), str(number + 1), groups_root=root, settings=promise)
        world.report(number)
        world.publish(number + 1, number)
        drawn = world.database.run_now(commitments.drawn, keeps=True)
        assert drawn[:2] == (1, 2)[: max(0, number - 2)]
    for recorded in world.database.run_now(store.entries, 0, 1000):
        chain.add(recorded.index, recorded.entry)
    assert {update: made.update for update, made in chain.promised.items()} == {1: 1, 2: 2, 3: 3}
    root_3 = world.database.run_now(store.root_at, chain.formed[3 + LATER])
    expected = (1, 2, 3) if is_drawn(root_3, 3, 2) else (1, 2)
    assert world.database.run_now(commitments.drawn, keeps=True) == expected
    assert world.database.run_now(commitments.drawn_before) == expected


def test_updates_before_the_operator_kept_any_are_not_drawn(world: World) -> None:
    key = world.join(1)
    for number in range(1, 6):
        for _ in range(2):
            world.earn(key, version=number)
        batch = world.batch(number)
        assert batch is not None
        root = groups_root(group.to_bytes() for group in batch.groups)
        settings = b'{"kept_one_in":%d}' % (number > 1)
        commit(world, number, str(number), str(number + 1), groups_root=root, settings=settings)
        world.report(number)
        world.publish(number + 1, number)
    assert world.database.run_now(commitments.drawn, keeps=True) == (2, 3)


def test_a_kept_batch_has_what_each_node_signed(world: World) -> None:
    key = world.join(1)
    for _ in range(2):
        world.earn(key)
    batch = world.batch(1)
    assert batch is not None
    kept = world.database.run_now(commitments.kept_batch, 1)
    assert kept.groups == batch.groups
    payloads = [open_envelope("rollout", envelope).payload for envelope in kept.rollouts]
    assert [digest(payload) for payload in payloads] == [group.claim_id for group in batch.groups]
    assert world.database.run_now(commitments.drawn, keeps=False) == ()
