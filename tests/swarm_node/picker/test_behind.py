"""Nodes that are behind: who has less of a version goes ahead, and everybody soon has something that others lack."""

from dataclasses import replace
from random import Random

from protocol.policy.chunks import chunk_id
from swarm_node.picker.picker import Picker
from swarm_node.picker.sources import ChunkSource, PlanPace
from tests.swarm_node.picker_world import PEER_A, PEER_C, RULES, SEEDER, STRIPES, asked_of, picker_for

MANY = [chunk_id(number.to_bytes(2)) for number in range(300)]


def told_of(count: int) -> Picker:
    """Both peers say that they hold so many of the chunks, and the picker looks around."""
    picker = picker_for(PEER_A, PEER_C, chunks=MANY)
    for peer in (PEER_A, PEER_C):
        picker.had(peer.name, MANY[:count], 0.0)
    picker.next(0.0)
    return picker


def test_who_has_less_than_its_peers_by_more_than_a_little_is_behind() -> None:
    little = int(RULES.behind * len(MANY))
    assert not told_of(little).is_behind
    picker = told_of(little + 1)
    assert picker.is_behind
    picker.delivered(PEER_A.name, MANY[0], 0.1)
    assert not picker.is_behind


def test_one_of_two_peers_that_boasts_puts_nobody_behind() -> None:
    picker = picker_for(PEER_A, PEER_C, chunks=MANY)
    for _ in range(3):
        picker.had(PEER_A.name, MANY, 0.0)
    picker.next(0.0)
    assert not picker.is_behind


def test_what_a_peer_says_twice_or_of_another_version_counts_once_or_not_at_all() -> None:
    """A peer tells everything again on a new stream, and when it begins to fetch another version."""
    picker = picker_for(PEER_A, PEER_C, chunks=MANY)
    others = [chunk_id(number.to_bytes(3)) for number in range(300)]
    for peer in (PEER_A, PEER_C):
        for _ in range(10):
            picker.had(peer.name, MANY[:5], 0.0)
        picker.had(peer.name, others, 0.0)
    picker.next(0.0)
    assert not picker.is_behind


def test_who_is_alone_with_the_seeder_is_not_behind() -> None:
    picker = picker_for(SEEDER, chunks=MANY)
    picker.next(0.0)
    assert not picker.is_behind


def test_who_is_behind_takes_over_what_it_can_before_anybody_is_late() -> None:
    part_of_a = MANY[0::3]
    for held, takes_over in ((part_of_a[:6], False), (part_of_a, True)):
        picker = picker_for(PEER_A, PEER_C, chunks=MANY)
        picker.had(PEER_C.name, held, 0.0)
        picker.had(PEER_A.name, MANY[2::3][: len(held)], 0.0)
        assert bool(set(asked_of(picker.next(0.0), PEER_C)) & set(part_of_a)) is takes_over


def test_nodes_that_ask_the_seeder_ask_for_different_chunks() -> None:
    """Nodes that asked in one order would all have the same at any time, and nothing to give to each other."""
    alone = ChunkSource("seeder", "seeder", range(3))
    first = [
        Picker(MANY, MANY, [alone], stripes=3, rng=Random(seed), now=0.0, rules=replace(RULES, window=16)).next(0.0)
        for seed in range(2)
    ]
    assert len({order.chunk for orders in first for order in orders}) > 24


def test_the_seeder_is_asked_for_what_no_peer_holds() -> None:
    alone = ChunkSource("seeder", "seeder", range(3))
    picker = picker_for(alone, replace(PEER_A, stripes=()), chunks=MANY[:20])
    picker.had(PEER_A.name, MANY[:18], 0.0)
    assert set(asked_of(picker.next(0.0), alone)) == set(MANY[18:20])


def test_whose_exchange_ended_does_not_count_as_one_that_holds_nothing() -> None:
    spares = [ChunkSource("d", "peer"), ChunkSource("e", "peer")]
    picker = picker_for(PEER_A, PEER_C, *spares, chunks=MANY)
    for peer in (PEER_A, PEER_C):
        picker.had(peer.name, MANY, 0.0)
    picker.next(0.0)
    assert not picker.is_behind
    picker.failed("d", 1.0)
    picker.parted("e", 1.0)
    picker.next(1.0)
    assert picker.is_behind
    for spare in spares:
        picker.had(spare.name, MANY[:1], 2.0)
    picker.next(2.0)
    assert not picker.is_behind


def test_whom_a_later_plan_does_not_name_does_not_count_as_one_that_holds_nothing() -> None:
    gone = [ChunkSource(name, "peer") for name in ("never", "reached")]
    picker = picker_for(PEER_A, *gone, chunks=MANY)
    picker.had(PEER_A.name, MANY, 0.0)
    picker.next(0.0)
    assert not picker.is_behind
    picker.follow([PEER_A], stripes=STRIPES, pace=PlanPace())
    picker.next(1.0)
    assert picker.is_behind
