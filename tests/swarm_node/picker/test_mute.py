"""Parents that never deliver, as free keys may: what they should bring is asked of the seeder at once."""

from collections.abc import Callable

import pytest

from protocol.policy.chunks import chunk_id
from swarm_node.picker.picker import Ask, Picker
from swarm_node.picker.sources import PlanPace
from tests.swarm_node.picker_world import PEER_A, PEER_C, RULES, SEEDER, STRIPES, asked_of, picker_for, taken_back_from

CHUNKS = [chunk_id(number.to_bytes(2)) for number in range(30)]
CHUNK_S = 0.01
"""Seconds for the seeder and the sound peer to deliver a chunk."""

PACED = PlanPace(help_s=1000.0)
"""A large swarm, in which the seeder helps hardly ever."""


def fails(picker: Picker, order: Ask, now: float) -> None:
    """A port that nobody listens on."""
    picker.failed(order.source, now)


def is_silent(picker: Picker, order: Ask, now: float) -> None:
    """A peer that accepts, says that it holds everything, and never answers."""


@pytest.mark.parametrize("attack", [fails, is_silent])
def test_a_parent_that_never_delivers_costs_its_first_word_however_little_the_seeder_helps(
    attack: Callable[[Picker, Ask, float], None],
) -> None:
    picker = picker_for(PEER_A, PEER_C, SEEDER, chunks=CHUNKS, pace=PACED)
    now, asked = 0.0, list[tuple[Ask, float]]()
    for peer, stripe in ((PEER_A, 0), (PEER_C, 1)):
        picker.had(peer.name, CHUNKS[stripe::STRIPES], now)
    while picker.missing:
        for order in picker.next(now):
            if isinstance(order, Ask) and order.source == PEER_A.name:
                attack(picker, order, now)
            elif isinstance(order, Ask):
                asked.append((order, now))
        now += CHUNK_S
        for name in (PEER_C.name, SEEDER.name):
            first = next((ask for ask in asked if ask[0].source == name), None)
            if first:
                asked.remove(first)
                picker.delivered(name, first[0].chunk, now)
    assert now < RULES.first_word_s + 2 * len(CHUNKS) * CHUNK_S


def test_what_was_taken_back_from_a_parent_that_never_delivered_is_asked_of_the_other_without_its_word() -> None:
    picker, now = picker_for(PEER_A, PEER_C, chunks=CHUNKS[:1]), RULES.first_word_s
    picker.next(0.0)
    picker.had(PEER_C.name, CHUNKS[:1], 0.0)
    orders = picker.next(now)
    assert taken_back_from(orders, PEER_A) == asked_of(orders, PEER_C) == CHUNKS[:1]


def test_of_a_parent_that_has_delivered_before_the_word_is_waited_for() -> None:
    picker, now = picker_for(PEER_A, PEER_C, chunks=CHUNKS[:4]), RULES.first_word_s + 0.1
    picker.next(0.0)
    picker.delivered(PEER_A.name, CHUNKS[0], 0.05)
    picker.had(PEER_C.name, CHUNKS[3:4], 0.05)
    orders = picker.next(now)
    assert taken_back_from(orders, PEER_A) == CHUNKS[3:4]
    assert asked_of(orders, PEER_C) == []
