"""Newcomers beside others: their leases take nobody's room, cost little together, and let the honest among them in."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.rules.trust import OwnerStanding
from coordinator.store import tables
from coordinator.store.facts import get_fact
from coordinator.transactions import offers, standings, tally
from coordinator.transactions.newcomers import IN_LINE_MS, LINE, LINE_MAX
from protocol.wire.signing import NodeKey
from protocol.work.lease import Lease
from protocol.work.messages import LeaseRequest
from tests.coordinator.transactions.test_evaluations import evaluated, finish, half_right, measured, publish, shown
from tests.coordinator.transactions.test_owners import OWNER, delegate
from tests.coordinator.transactions.test_statements import LEASE, counted
from tests.coordinator.world import HONEST_TOKENS, World, answer

ROOM = 16
"""Groups that may be under way: S = 3, B = 4."""

TRIALS = 4
"""A quarter of them."""


@pytest.fixture
def world(tmp_path: Path, store_url: str) -> Iterator[World]:
    made = World(tmp_path, staleness=3, size=4, groups_per_request=ROOM, postgres_url=store_url)
    made.publish(1, 0)
    yield made
    made.database.close()


def proven(world: World, number: int = 100) -> NodeKey:
    """A node whose owner is known, and that has asked for work."""
    key = world.join(number)
    world.prove(key)
    world.give_back(key, world.lease(key))
    return key


def newcomers(world: World, first: int, *, place: str = "") -> Iterator[NodeKey]:
    """Ever new keys; each gets a lease."""
    while True:
        key = world.join(first)
        if not world.offer(key, place=place).leases:
            return
        yield key
        first += 1


def test_lease_hoarding_by_newcomers_takes_no_room_from_others(world: World) -> None:
    known = proven(world)
    assert len(list(newcomers(world, 1))) == TRIALS
    assert world.run(tally.read).unfinished == 0
    assert len(world.offer(known, groups=ROOM).leases) == ROOM
    assert world.run(tally.read) == world.run(tally.counted)


def test_new_keys_begin_no_more_trials_in_a_leases_time_than_their_budget(world: World) -> None:
    known = proven(world)
    begun, parts = 0, 10
    for part in range(3 * parts):
        begun += len(list(newcomers(world, 1 + 100 * part)))
        world.offer(known)
        world.now_ms += world.terms.timeout_ms // parts
    assert begun <= TRIALS + 3 * TRIALS


def test_new_keys_that_answer_at_once_with_garbage_begin_no_more_than_those_that_never_answer(world: World) -> None:
    proven(world)
    for number in range(1, 50):
        key = world.join(number)
        for lease in world.offer(key).leases:
            assert world.submit(key, answer(key, lease, lease_digest="0" * 64)).outcome == "rejected"
    assert world.rejected() == {"lease_mismatch": TRIALS}


def test_ever_new_keys_at_one_address_leave_a_newcomer_elsewhere_its_first_group(world: World) -> None:
    proven(world)
    assert len(list(newcomers(world, 1, place="198.51.100.7"))) == TRIALS // 4
    honest = world.join(90)
    (lease,) = world.offer(honest, place="203.0.113.5").leases
    assert world.submit(honest, answer(honest, lease)).outcome == "accepted"


def test_ever_new_keys_do_not_overtake_a_newcomer_that_waits(world: World) -> None:
    proven(world)
    assert len(list(newcomers(world, 1))) == TRIALS
    waiting = world.join(90)
    world.now_ms += 1
    for turn in range(TRIALS):
        assert not world.offer(waiting).leases
        if turn < TRIALS - 1:
            world.now_ms += 1
    world.now_ms += world.terms.timeout_ms // TRIALS
    assert not world.offer(world.join(91)).leases, "the next is the one that waits"
    assert world.offer(waiting).leases


def test_a_line_of_those_who_went_is_gone(world: World) -> None:
    known = proven(world)
    assert len(list(newcomers(world, 1))) == TRIALS
    for number in range(200, 200 + 2 * LINE_MAX):
        assert not world.offer(world.join(number)).leases
    assert len(world.run(get_fact, LINE)) == LINE_MAX
    world.now_ms += IN_LINE_MS + world.terms.timeout_ms
    world.lease(known)
    assert len(list(newcomers(world, 300))) == TRIALS


def test_an_honest_newcomer_is_proven_beside_those_who_work_and_gets_what_they_get(world: World) -> None:
    known, honest = proven(world), world.join(1)
    lease = world.lease(honest)
    assert world.submit(honest, answer(honest, lease)).outcome == "accepted"
    assert world.run(tally.read).unfinished == 1, "it counts once it is there"
    for _ in range(3):
        world.earn(known)
    batch = world.train(1)
    assert len(batch.groups) == 4
    assert world.owed(honest.node_id) == (0, HONEST_TOKENS)
    assert len(world.offer(honest, groups=3).leases) == 3, "it is no newcomer any more"
    assert world.run(tally.read).unfinished == 3
    assert world.audit() == []


def test_a_newcomers_answer_that_finds_no_room_is_paid_and_its_prompt_is_offered_again(world: World) -> None:
    known, late = proven(world), world.join(1)
    lease = world.lease(late)
    for given in world.offer(known, groups=ROOM).leases:
        world.submit(known, answer(known, given))
    assert world.offer(known).reason == "ahead"
    assert world.submit(late, answer(late, lease)).credit_micros == HONEST_TOKENS
    states = [row["state"] for row in world.rows(tables.rollouts)]
    assert (states.count("buffered"), states.count("surplus")) == (ROOM, 1)
    assert list(world.group_states().values()).count("open") == 1
    assert world.owed(late.node_id) == (0, HONEST_TOKENS)
    assert world.run(tally.read) == world.run(tally.counted)
    assert world.audit() == []


def test_a_trial_that_expires_opens_its_group_again_and_changes_no_count(world: World) -> None:
    known = proven(world)
    (hoarder, *_) = newcomers(world, 1)
    world.now_ms += world.terms.timeout_ms
    assert world.expire() == TRIALS
    assert set(world.group_states().values()) == {"open"}
    assert world.run(tally.read).unfinished == 0
    assert world.offer(hoarder).reason == "ahead", "it waits for what it let expire"
    assert len(world.offer(known, groups=ROOM).leases) == ROOM


def test_hoarders_do_not_make_a_batch_wait_for_the_shares_of_many_owners(world: World) -> None:
    """A single owner fills a batch if few are at work, however many free keys hold leases."""
    world.terms = replace(world.terms, max_owner_share=0.5)
    known = proven(world)
    list(newcomers(world, 1))
    for lease in world.offer(known, groups=4).leases:
        world.submit(known, answer(known, lease))
    assert world.batch(1) is not None


def test_hoarded_groups_are_not_given_to_a_second_node_in_the_place_of_late_ones(world: World) -> None:
    world.terms = replace(world.terms, over_issue=1, staleness=0, groups_per_update=2)
    known, slow = proven(world), proven(world, 101)
    for key in (known, slow):
        lease = world.lease(key)
        world.now_ms += 10
        world.submit(key, answer(key, lease))
    world.train(1)
    world.publish(2, 1)
    assert len(list(newcomers(world, 1))) == 0, "this world gives newcomers version 1 alone"
    hoarder = world.join(9)
    assert world.offer(hoarder, version=2).leases
    world.now_ms += 50
    late = world.lease(slow, version=2)
    world.earn(known, version=2)
    world.now_ms += 100
    assert world.lease(known, version=2).prompt == late.prompt


def test_a_lease_of_a_newcomer_takes_as_many_statements_however_many_came_before(world: World) -> None:
    proven(world)
    ask = LeaseRequest(version=1, groups=1)
    for number in range(1, TRIALS + 1):
        key = world.join(number)
        offered, statements = counted(world, offers.offer, key.node_id, ask, terms=world.terms, draw=world.draw)
        assert offered.leases
        assert len(statements) <= LEASE + 1, "\n".join(statements)


def test_lease_hoarding_by_many_nodes_of_an_owner_takes_no_more_room_than_was_found_right_of_it(world: World) -> None:
    """Otherwise one good group and free signatures would be worth all the room."""
    world.terms = replace(world.terms, newcomer_leases=2)
    proven(world)
    world.prove(OWNER, 1)
    held = 0
    for number in range(1, 40):
        key = world.join(number)
        delegate(world, key, number=number)
        held += len(world.offer(key, groups=ROOM).leases)
    assert held <= 2 + TRIALS
    assert world.run(tally.read).unfinished <= 2


def test_a_second_machine_of_an_owner_who_works_is_like_the_first_after_one_answer(world: World) -> None:
    proven(world)
    first, second = world.join(1), world.join(2)
    for number, key in enumerate((first, second), 1):
        delegate(world, key, number=number)
    world.earn(first)
    world.run(standings.put, OWNER.node_id, OwnerStanding(claims=1, groups=1))
    world.offer(first, groups=4)
    assert len(world.offer(second, groups=4).leases) == 1
    (trial,) = [row["group_no"] for row in world.rows(tables.leases) if row["node_id"] == second.node_id]
    assert world.group_states()[trial] == "trial"
    (lease,) = [Lease.from_bytes(row["offer"]) for row in world.rows(tables.leases) if row["group_no"] == trial]
    world.submit(second, answer(second, lease))
    assert len(world.offer(second, groups=4).leases) == 4


class TestEvaluations:
    ONE = evaluated(every=2, problems=1, samples=4, patience_s=60.0)

    def test_what_a_hoarder_was_to_measure_goes_to_another_at_once_and_the_first_answer_counts(
        self, world: World
    ) -> None:
        known, hoarder = proven(world), world.join(1)
        assert publish(world, 2, 1) == 0
        assert publish(world, 3, 2) == 1
        held = world.lease(hoarder, version=3)
        finish(world, known, 3)
        (row,) = shown(world)
        assert (row["state"], row["answered"]) == ("done", row["problems"])
        assert world.submit(hoarder, half_right(hoarder, held)).outcome == "accepted", "it is paid all the same"
        states = [one["state"] for one in world.rows(tables.rollouts)]
        assert (states.count("measured"), states.count("surplus")) == (row["problems"], 1)
        assert world.audit() == []

    def test_what_only_a_newcomer_works_on_again_goes_to_the_next(self, world: World) -> None:
        known, other, hoarder = proven(world), proven(world, 101), world.join(1)
        publish(world, 2, 1)
        publish(world, 3, 2, self.ONE)
        held = world.lease(hoarder, version=3)
        (lease,) = measured(world.offer(known, version=3, groups=8))
        assert lease.prompt == held.prompt
        assert not measured(world.offer(other, version=3, groups=8)), "one of those who are known works on it"
        world.give_back(known, lease)
        assert [one.prompt for one in measured(world.offer(other, version=3, groups=8))] == [held.prompt]

    def test_hoarders_take_no_part_of_those_who_measure(self, world: World) -> None:
        known, others = proven(world), [proven(world, number) for number in range(101, 104)]
        for key in others:
            world.lease(key)
        publish(world, 2, 1)
        publish(world, 3, 2)
        assert any(measured(world.offer(world.join(number), version=3)) for number in range(1, TRIALS + 1))
        assert measured(world.offer(known, version=3))
