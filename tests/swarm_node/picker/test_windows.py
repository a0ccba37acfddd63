"""The number of chunks that are asked of a source at once, and how that depends on its link."""

import pytest

from protocol.policy.chunks import chunk_id
from swarm_node.picker.sources import ChunkSource
from tests.swarm_node.picker_world import CHUNKS, PEER_A, PEER_C, RULES, SEEDER, STRIPES, asked_of, picker_for


def open_wants(*phases: tuple[int, float]) -> list[int]:
    """Return how many WANTs a source has after each phase: so many chunks, each taking 0.1 s, so long after one
    another.
    """
    many = [chunk_id(number.to_bytes(2)) for number in range(400)]
    alone = ChunkSource("seeder", "seeder", range(STRIPES))
    picker = picker_for(alone, chunks=many)
    owed, found, now = asked_of(picker.next(0.0), alone), [], 0.0
    for chunks, idle_s in phases:
        for _ in range(chunks):
            now += idle_s
            picker.began(alone.name, owed[0], now)
            now += 0.1
            picker.delivered(alone.name, owed.pop(0), now)
            owed += asked_of(picker.next(now), alone)
        found.append(len(owed))
    return found


def test_a_link_that_falls_idle_between_chunks_is_asked_for_more_until_it_does_not() -> None:
    least, most = RULES.window, RULES.window_max
    assert open_wants((4, 0.2)) == [least + 3]
    assert open_wants((40, 0.0)) == [least]
    assert open_wants((40, 0.2), (RULES.fluent * (most - least), 0.0)) == [most, least]


def test_the_time_that_a_want_travels_does_not_count_as_time_of_sending() -> None:
    alone = ChunkSource("seeder", "seeder", range(STRIPES))
    picker = picker_for(alone, chunks=CHUNKS[:1])
    assert len(picker.next(0.0)) == 1
    picker.began(alone.name, CHUNKS[0], 0.4)
    picker.delivered(alone.name, CHUNKS[0], 0.5)
    assert picker.busy_s(alone.name) == pytest.approx(0.1)


def test_a_seeder_that_is_ahead_of_the_whole_takes_over_though_all_others_are_equally_late() -> None:
    many = [chunk_id(number.to_bytes(2)) for number in range(300)]
    picker = picker_for(PEER_A, PEER_C, SEEDER, chunks=many)
    now, taken_over = 0.0, 0
    for _ in range(600):
        now += 0.01
        for chunk in asked_of(picker.next(now), SEEDER):
            taken_over += many.index(chunk) % STRIPES not in SEEDER.stripes
            picker.delivered(SEEDER.name, chunk, now + 0.005)
        for number, peer in enumerate((PEER_A, PEER_C)):
            left = [chunk for chunk in many[number::3] if chunk in picker._states[peer.name].asked]
            if left and round(now * 100) % 20 == 0:
                picker.delivered(peer.name, left[0], now)
    assert taken_over > 10
