"""An owner's share: of what is under way and of each batch, whoever finished the groups."""

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.store import tables
from coordinator.transactions import leases, scoring, standings
from protocol.wire.signing import NodeKey
from tests.coordinator.transactions.test_escrow import finish, states
from tests.coordinator.world import World, answer


class TestShares:
    def crowd(self, folder: Path, owners: int, *, size: int = 4, staleness: int = 0) -> tuple[World, list[NodeKey]]:
        """A round of a few groups an update, of which half may be one owner's."""
        world = World(folder, staleness=staleness, size=size)
        world.terms = replace(world.terms, max_owner_share=0.5)
        world.publish(1, 0)
        return world, [world.join(number + 1) for number in range(owners)]

    def test_no_owner_gets_more_than_its_share_of_work_and_batch_among_many(self, tmp_path: Path) -> None:
        world, (greedy, *others) = self.crowd(tmp_path, 4)
        held = [world.lease(key) for key in others]
        world.give_back(others[0], held[0])
        world.lease(others[0])
        assert len(world.offer(greedy, groups=4).leases) == 1  # one of four is left
        world.database.close()

    def test_a_batch_waits_for_others_when_one_owner_has_filled_its_share(self, tmp_path: Path) -> None:
        world, (greedy, *others) = self.crowd(tmp_path, 4)
        world.terms = replace(world.terms, staleness=5)
        for key in (greedy, greedy, greedy):
            world.earn(key)
        for key in others[:2]:
            world.lease(key)
        assert world.batch(1) is None
        world.earn(others[2])
        assert world.batch(1) is None, "of the greedy one's three groups only two may enter"
        world.earn(others[2])
        batch = world.batch(1)
        assert batch is not None
        assert sorted(world.group_states().values()).count("trained") == 4
        assert [row["state"] for row in world.rows(tables.rollouts)] == [
            "batched", "batched", "buffered", "batched", "batched",
        ]  # fmt: skip
        world.database.close()

    def test_groups_that_an_owner_only_began_count_for_its_share_of_a_batch(self, tmp_path: Path) -> None:
        world, (greedy, *heirs) = self.crowd(tmp_path, 5)
        left = [world.leave(greedy, {0: [10 + number]}, heir=heir) for number, heir in enumerate(heirs)]
        for heir, lease in zip(heirs, left, strict=True):
            assert world.submit(heir, answer(heir, lease)).outcome == "accepted"
        assert world.batch(1) is None, "four of four groups hold its tokens"
        assert world.run(standings.at_work, greedy.node_id) == 2
        assert world.offer(greedy, groups=4).leases == ()
        afresh = [world.lease(heir) for heir in heirs[:2]]
        assert [lease.prefixes for lease in afresh] == [(), ()], "nobody works any more: the places are others'"
        for heir, lease in zip(heirs[:2], afresh, strict=True):
            assert world.submit(heir, answer(heir, lease)).outcome == "accepted"
        batch = world.batch(1)
        assert batch is not None
        assert [bool(group.earlier) for group in batch.groups] == [True, True, False, False]
        world.report(1)
        finish(world)
        assert world.owed(greedy.node_id) == (0, 4), "all of it is paid"
        assert world.audit() == []
        world.database.close()

    def test_groups_beyond_a_share_keep_their_place_while_others_work(self, tmp_path: Path) -> None:
        world, (greedy, *heirs) = self.crowd(tmp_path, 5, staleness=5)
        left = [world.leave(greedy, {0: [10 + number]}, heir=heir) for number, heir in enumerate(heirs)]
        held = world.lease(heirs[0])
        world.terms = replace(world.terms, staleness=0)  # no place is free
        for heir, lease in zip(heirs, left, strict=True):
            assert world.submit(heir, answer(heir, lease)).outcome == "accepted"
        assert world.batch(1) is None
        assert states(world) == ["buffered"] * 4
        assert world.submit(heirs[0], answer(heirs[0], held)).outcome == "accepted"
        assert world.batch(1) is None
        assert states(world) == ["buffered"] * 3 + ["surplus", "buffered"], "one is missing, one gives its place"
        world.database.close()

    def test_nobody_is_paid_for_giving_a_place_to_others_while_places_are_free(self, tmp_path: Path) -> None:
        world, (greedy, *others) = self.crowd(tmp_path, 4, size=8, staleness=1)
        for key in (*others, *[greedy] * 8):
            world.earn(key)
        for _ in range(2):
            assert world.batch(1) is None, "three of the others', and four of the greedy one's"
            assert states(world) == ["buffered"] * 11, "five places are free to whoever comes"
        assert world.offer(greedy).leases == ()
        world.earn(others[0])
        batch = world.batch(1)
        assert batch is not None
        assert len(batch.groups) == 8
        assert states(world).count("surplus") == 0
        world.database.close()

    def starving(self, folder: Path) -> tuple[World, NodeKey]:
        """Prepare an owner at its limit, and three others with one group each: one of eight is missing."""
        world, (greedy, *others) = self.crowd(folder, 4, size=8, staleness=1)
        for key in (*others, *[greedy] * 8):
            world.earn(key)
        assert world.batch(1) is None
        return world, greedy

    def test_a_learner_that_nobody_else_brings_anything_waits_no_longer_than_a_lease_lasts(
        self, tmp_path: Path
    ) -> None:
        world, greedy = self.starving(tmp_path)
        world.now_ms += world.terms.timeout_ms - 1
        assert world.batch(1) is None
        assert world.offer(greedy).leases == ()
        world.now_ms += 1
        assert len(world.offer(greedy).leases) == 1, "the others have left"
        world.train(1)
        assert states(world).count("batched") == 8
        world.now_ms += world.terms.timeout_ms - 1
        assert not world.run(leases.is_held_up, world.terms, world.now_ms), "it trained meanwhile"
        world.now_ms += 1
        assert world.run(leases.is_held_up, world.terms, world.now_ms)
        world.database.close()

    def test_a_learner_that_trains_or_has_nothing_is_held_up_by_nobody(self, tmp_path: Path) -> None:
        world, (greedy, *others) = self.crowd(tmp_path, 4, size=8, staleness=1)
        much_later_ms = world.now_ms + 10 * world.terms.timeout_ms
        assert not world.run(leases.is_held_up, world.terms, much_later_ms)
        for key in (*others, *others, *[greedy] * 2):
            world.earn(key)
        assert world.batch(1) is not None
        assert not world.run(leases.is_held_up, world.terms, much_later_ms)
        world.database.close()

    @pytest.mark.parametrize("event", ["publish", "come back"])
    def test_the_time_begins_anew_when_nodes_have_to_fetch_a_version_or_nobody_could_answer_them(
        self, tmp_path: Path, event: str
    ) -> None:
        world, _ = self.starving(tmp_path)
        world.now_ms += world.terms.timeout_ms
        if event == "publish":
            world.publish(2, 0)
        else:
            times = {"alive_ms": world.now_ms - 1, "timeout_ms": world.terms.timeout_ms, "back_ms": 0}
            world.run(leases.extend_after_downtime, now_ms=world.now_ms, **times)
        assert world.batch(1) is None
        world.now_ms += world.terms.timeout_ms
        assert world.batch(1) is not None
        world.database.close()

    def test_groups_that_wait_for_their_rewards_keep_the_shares(self, tmp_path: Path) -> None:
        """Else who brings what takes long to judge, behind which the others' groups wait, would have whole batches."""
        world, _ = self.starving(tmp_path)
        world.judge = replace(world.judge, reward=None)
        slow = world.join(9)
        world.earn(slow)
        world.now_ms += world.terms.timeout_ms
        assert world.batch(1) is None
        (late,) = world.run(scoring.waiting, 100)
        world.run(scoring.give_up, late.claim_id, "It hung.", audits=world.audits, now_ms=world.now_ms)
        assert world.batch(1) is not None, "what cannot be judged buys no more time"
        world.database.close()

    def test_a_round_of_few_owners_is_held_up_by_no_share(self, tmp_path: Path) -> None:
        world, (greedy, _) = self.crowd(tmp_path, 2)
        assert len(world.offer(greedy, groups=4).leases) == 4
        world.database.close()
