"""Retractions in the store: whose groups were trained on, the hold of batches, and the entry with its order."""

from typing import Any

import pytest
from pydantic import ValidationError

from coordinator.rules.retraction import EarlierRetraction, OwnedGroup
from coordinator.service.publication import ORDERED, Replacement, entered, hold_batches, newest_replacement
from coordinator.store import tables
from coordinator.store.facts import set_fact
from coordinator.transactions import batches, commitments, orders, retractions, standings
from coordinator.transactions.retractions import RetractionResult
from ledger import store
from ledger.entry import RetractionEntry
from protocol.errors import OutOfOrder
from tests.coordinator.transactions.test_commitments import commit
from tests.coordinator.transactions.test_parts import first_token
from tests.coordinator.world import World, answer


def result(world: World, **change: Any) -> RetractionResult:
    fields = {
        "owners": [world.join(1).node_id], "first": 2, "last": 2, "before": "2" * 64, "after": "9" * 64, "left_out": 1,
        "left_out_root": "c" * 64,
    }  # fmt: skip
    return RetractionResult.model_validate(fields | change)


@pytest.fixture
def played(world: World) -> World:
    """Two batches of two groups, by owners 1 and 2, with both updates in the ledger."""
    keys = world.join(1), world.join(2)
    for number in (1, 2):
        for key in keys:
            world.earn(key)
        batch = world.train(number)
        assert commit(world, number, str(number), str(number + 1), groups_root=commitments_root(world, number))
        assert len(batch.groups) == 2
    return world


def ban(world: World) -> None:
    world.run(standings.ban, world.join(1).node_id, world.now_ms)


def commitments_root(world: World, number: int) -> str:
    found = world.run(store.find, f"batch:{number}")
    return str(found.entry.groups_root)


def test_the_groups_of_an_owner_are_found_in_the_order_of_batches(played: World) -> None:
    owner = played.join(1).node_id
    found = played.run(retractions.owned_groups, {owner})
    assert [each.batch for each in found] == [1, 2]
    assert all(isinstance(each, OwnedGroup) and each.owners == {owner} for each in found)
    assert played.run(retractions.batch_sizes) == {1: 2, 2: 2}
    assert played.run(retractions.update_s) == 3.0
    assert played.run(retractions.owned_groups, {played.join(3).node_id}) == []
    tokens = sum(row["tokens"] for row in played.rows(tables.rollouts) if row["node_id"] == owner)
    assert played.run(retractions.tokens_of, [each.claim_id for each in found]) == tokens > 0


def test_the_beginner_of_a_group_counts_as_its_owner_too(world: World) -> None:
    beginner, heir = world.join(1), world.join(2)
    lease = world.leave(beginner, {0: [first_token(world)]}, heir=heir)
    assert world.submit(heir, answer(heir, lease)).outcome == "accepted"
    world.earn(heir)
    world.train(1)
    assert len(world.run(retractions.owned_groups, {heir.node_id})) == 2
    (begun,) = world.run(retractions.owned_groups, {beginner.node_id})
    assert (begun.batch, begun.owners) == (1, {beginner.node_id})
    (both,) = (
        each for each in world.run(retractions.owned_groups, {beginner.node_id, heir.node_id}) if len(each.owners) > 1
    )
    assert both.claim_id == begun.claim_id


def test_no_batch_is_formed_while_it_is_held_and_the_hold_ends_by_itself(played: World) -> None:
    assert played.run(batches.hold, 60.0, played.now_ms) == 2
    for _ in range(2):
        played.earn(played.join(1))
    assert played.batch(3) is None
    assert played.batch(2) is not None, "a batch that was formed is returned again"
    played.now_ms += 61_000
    assert played.batch(3) is not None


def test_a_result_that_lacks_the_newest_batch_or_lies_about_its_start_is_refused(played: World) -> None:
    ban(played)
    for change, said in (
        ({"last": 1, "first": 1}, "batch 2 was formed since then"),
        ({"before": "7" * 64}, "which is none after update 1"),
    ):
        with pytest.raises(OutOfOrder, match=said):
            played.run(retractions.require_current, result(played, **change), 2, now_ms=played.now_ms)
    played.publish(2, 2)
    played.run(retractions.require_current, result(played), 2 + 1, now_ms=played.now_ms)
    for _ in range(2):
        played.earn(played.join(2))
    assert played.batch(3) is None, "until the result is published"


def test_a_ban_that_is_lifted_during_the_replay_stops_the_retraction(played: World) -> None:
    """The next batches could have the owner's groups, and the order would say that the policy never saw them."""
    owner = played.join(1).node_id
    ban(played)
    assert played.run(standings.forgive, owner)
    with pytest.raises(OutOfOrder, match="was lifted") as refused:
        played.run(retractions.require_current, result(played), 3, now_ms=played.now_ms)
    assert owner in refused.value.message
    for _ in range(2):
        played.earn(played.join(2))
    assert played.batch(3) is not None, "nothing is held"


def test_the_ban_of_an_owner_who_was_retracted_before_must_hold_if_it_is_named_again(played: World) -> None:
    """The owner's newer groups would be left out, and the next batches could have more of them."""
    order = {"action": "retract", "stage": "", "reason": "a trigger", "given_by": "me", "becomes": 2}
    made = result(played)
    played.run(set_fact, ORDERED, order | {"retraction": made.model_dump(mode="json")})
    played.publish(2, 2)
    played.run(entered, 2, played.now_ms)
    assert played.run(retractions.earlier_retractions)
    for named in (made.owners, None):
        again = made.model_copy(update={"named": named})
        with pytest.raises(OutOfOrder, match="was lifted"):
            played.run(retractions.require_current, again, 3, now_ms=played.now_ms)
    others = made.model_copy(update={"named": ()})  # what was taken back before stays so, banned or not
    played.run(retractions.require_current, others, 3, now_ms=played.now_ms)
    assert others.entry(3).owners == made.owners


def test_batches_are_held_until_the_order_is_settled_whatever_a_command_asks(played: World) -> None:
    """A batch in between would be missing in the entry, and no update could follow it."""
    ban(played)
    played.publish(2, 2)
    made = result(played)
    played.run(retractions.require_current, made, 3, now_ms=played.now_ms)
    played.run(set_fact, ORDERED, {"action": "retract", "becomes": 3, "retraction": made.model_dump(mode="json")})
    for _ in range(2):
        played.earn(played.join(2), version=2)
    assert played.run(hold_batches, 0.0, played.now_ms) == 2
    played.now_ms += 10 * 3_600_000
    assert played.batch(3) is None
    played.run(set_fact, ORDERED, None)
    played.run(hold_batches, 0.0, played.now_ms)
    for _ in range(2):
        played.earn(played.join(2), version=2)
    assert played.batch(3) is not None


def test_the_entry_is_made_with_the_order_and_the_next_update_begins_with_its_state(played: World) -> None:
    made = result(played)
    order = {"action": "retract", "stage": "", "reason": "a trigger", "given_by": "me", "becomes": 2}
    played.run(set_fact, ORDERED, order | {"retraction": made.model_dump(mode="json")})
    played.run(batches.hold, 3600.0, played.now_ms)
    played.publish(2, 2)
    played.run(entered, 2, played.now_ms)
    found = played.run(commitments.retraction_to, 2)
    assert isinstance(found, RetractionEntry)
    assert (found.version, found.after, found.owners) == (2, "9" * 64, made.owners)
    assert played.run(newest_replacement) == 2
    assert played.run(retractions.last_chosen) == 0
    assert played.run(retractions.earlier_retractions) == [EarlierRetraction(2, 2, frozenset(made.owners))]
    (told,) = played.run(orders.about, "version 2")
    assert told["reason"] == "updates 2 to 2 without 1 groups: a trigger"

    for _ in range(2):
        played.earn(played.join(2), version=2)
    assert played.batch(3) is not None, "batches are formed again"
    root = commitments_root(played, 3)
    with pytest.raises(OutOfOrder, match="other weights were put in its place"):
        commit(played, 3, "8", "a", replaced_by=2, groups_root=root)
    assert commit(played, 3, "9", "a", replaced_by=2, groups_root=root)
    assert played.audit() == []


@pytest.mark.parametrize("action", ["rollback", "publish", "retract"])
def test_only_the_order_retract_has_a_retraction(action: str, world: World) -> None:
    fields = {"action": action, "reason": "a test", "given_by": "me"}
    given = None if action == "retract" else result(world).model_dump(mode="json")
    with pytest.raises(ValidationError, match="no other order has one"):
        Replacement.model_validate(fields | {"retraction": given})
