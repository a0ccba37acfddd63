"""An owner's share: of what is under way and of each batch, whoever finished the groups."""

from dataclasses import replace
from pathlib import Path

from coordinator.people import standings
from coordinator.store import tables
from protocol.signing import NodeKey
from tests.coordinator.test_escrow import finish, states
from tests.coordinator.world import World, answer


class TestShares:
    def crowd(self, folder: Path, owners: int) -> tuple[World, list[NodeKey]]:
        """A round of four groups an update, of which half may be one owner's."""
        world = World(folder, staleness=0, size=4)
        world.audits = replace(world.audits, max_owner_share=0.5)
        world.terms = replace(world.terms, max_owner_share=0.5)
        world.publish(1, 0)
        return world, [world.join(number + 1) for number in range(owners)]

    def test_no_owner_gets_more_than_its_share_of_work_and_batch_among_many(self, tmp_path: Path) -> None:
        world, (greedy, *others) = self.crowd(tmp_path, 4)
        leases = [world.lease(key) for key in others]
        world.give_back(others[0], leases[0])
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
        leases = [world.leave(greedy, {0: [10 + number]}, heir=heir) for number, heir in enumerate(heirs)]
        for heir, lease in zip(heirs, leases, strict=True):
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
        world, (greedy, *heirs) = self.crowd(tmp_path, 5)
        world.terms = replace(world.terms, staleness=5)
        leases = [world.leave(greedy, {0: [10 + number]}, heir=heir) for number, heir in enumerate(heirs)]
        held = world.lease(heirs[0])
        for heir, lease in zip(heirs, leases, strict=True):
            assert world.submit(heir, answer(heir, lease)).outcome == "accepted"
        assert world.batch(1) is None
        assert states(world) == ["buffered"] * 4
        assert world.submit(heirs[0], answer(heirs[0], held)).outcome == "accepted"
        assert world.batch(1) is None
        assert states(world) == ["buffered"] * 3 + ["surplus", "buffered"], "one is missing, one gives its place"
        world.database.close()

    def test_a_round_of_few_owners_is_held_up_by_no_share(self, tmp_path: Path) -> None:
        world, (greedy, _) = self.crowd(tmp_path, 2)
        assert len(world.offer(greedy, groups=4).leases) == 4
        world.database.close()
