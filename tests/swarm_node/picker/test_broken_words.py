"""Sources that do not do what they said: nothing waits for them, and no more is asked of them than of any other."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import trio

from protocol import limits
from protocol.ids import ChunkId
from protocol.wire.frames import Have, Reason, Reject, Want
from swarm_node.p2p.link import Link
from swarm_node.picker.picker import Ask, Picker, TakeBack
from swarm_node.picker.sources import ChunkSource, PlanPace
from tests.swarm_node.p2p_world import (
    QUICK,
    as_peer,
    fetch,
    holds_exactly,
    make_version,
    node,
    plan_of,
    stall,
    store,
)
from tests.swarm_node.picker_world import CHUNKS, HTTP, PEER_A, RULES, SEEDER, STRIPES, asked_of, picker_for

SPARE_SEEDER, ALONE = replace(SEEDER, stripes=()), replace(PEER_A, stripes=(0, 1, 2))


def kept_for_the_seeder() -> tuple[Picker, float]:
    """One chunk, asked of a parent that does not say a word, and kept for the seeder until it does."""
    picker, now = picker_for(ALONE, SPARE_SEEDER, HTTP, chunks=CHUNKS[:1]), RULES.ahead_s
    assert picker.next(0.0) == [Ask(ALONE.name, CHUNKS[0])]
    assert asked_of(picker.next(now), SPARE_SEEDER) == []
    return picker, now


def test_what_was_kept_for_a_source_that_a_later_plan_does_not_name_is_open_to_others() -> None:
    picker, now = kept_for_the_seeder()
    picker.follow([ALONE, HTTP], stripes=STRIPES, pace=PlanPace())
    picker.refused(ALONE.name, CHUNKS[0], Reason.CANCELLED, now)
    assert asked_of(picker.next(now + RULES.look_s), ALONE) == CHUNKS[:1]


def test_who_is_in_the_plan_again_has_not_failed_by_having_left_it() -> None:
    picker = picker_for(ALONE, HTTP)
    picker.follow([HTTP], stripes=STRIPES, pace=PlanPace())
    picker.follow([ALONE, HTTP], stripes=STRIPES, pace=PlanPace())
    assert len(asked_of(picker.next(0.0), ALONE)) == RULES.waits


def test_a_source_that_is_always_busy_does_not_take_what_is_kept_for_another() -> None:
    """The parent of before owes the chunk and says no word, that of now refuses it whenever it is asked."""
    picker, now = picker_for(PEER_A, HTTP, chunks=CHUNKS[:1]), 0.0
    picker.next(now)
    silent, busy = replace(PEER_A, stripes=()), replace(SEEDER, stripes=(0,))
    picker.follow([silent, busy, HTTP], stripes=STRIPES, pace=PlanPace())
    while Ask(HTTP.name, CHUNKS[0]) not in (orders := picker.next(now)):
        for chunk in asked_of(orders, busy):
            picker.refused(busy.name, chunk, Reason.BUSY, now)
        now = picker.wake_at(now)
        assert now < RULES.origin_patience_s + 2 * RULES.confirm_s


def test_an_origin_that_sends_on_what_was_taken_back_is_not_asked_for_it_again() -> None:
    """The seeder lacks the chunk, a peer takes it over from the slow origin and fails."""
    seeder, late_s = replace(SEEDER, stripes=(0,)), 2 * RULES.last_overdue_s
    picker = picker_for(seeder, HTTP, chunks=CHUNKS[:1])
    assert picker.next(0.0) == [Ask(seeder.name, CHUNKS[0])]
    picker.refused(seeder.name, CHUNKS[0], Reason.ABSENT, 0.0)
    assert picker.next(0.0) == [Ask(HTTP.name, CHUNKS[0])]
    picker.follow([PEER_A, seeder, HTTP], stripes=STRIPES, pace=PlanPace())
    picker.had(PEER_A.name, CHUNKS[:1], late_s)
    assert set(picker.next(late_s)) == {Ask(PEER_A.name, CHUNKS[0]), TakeBack(HTTP.name, CHUNKS[0])}
    picker.failed(PEER_A.name, late_s)
    assert asked_of(picker.next(late_s), HTTP) == []


def lost_by(source: ChunkSource, chunks: list[ChunkId], picker: Picker, now: float) -> None:
    """Lose a peer that says that it holds these, and has none of them when asked."""
    picker.had(source.name, chunks, now)
    for chunk in chunks:
        picker.refused(source.name, chunk, Reason.ABSENT, now)


def test_who_boasts_is_asked_for_no_more_at_once_than_who_says_nothing() -> None:
    picker = picker_for(ALONE)
    lost_by(ALONE, CHUNKS, picker, 0.0)
    assert len(picker.next(RULES.pause_max_s)) == RULES.waits


@pytest.mark.trio
async def test_a_boaster_with_nothing_to_give_breaks_no_rule_of_ours(tmp_path: Path) -> None:
    """All chunks that it told of and lacked were once asked of it at the same moment: more than a stream may carry."""
    version = make_version(4 * limits.EXCHANGE_WANTS_MAX)
    lost, all_lost = set[ChunkId](), trio.Event()

    async def boast(link: Link) -> None:
        names = iter(version.chunks)
        while told := tuple(islice(names, limits.EXCHANGE_HAVE_NAMES_MAX)):
            await link.send(Have(told), stall_s=1.0)
        while not all_lost.is_set():
            for message in await link.receive():
                assert isinstance(message, Want)
                lost.add(message.chunk)
                await link.send(Reject(message.chunk, Reason.ABSENT), stall_s=1.0)
            if len(lost) > 3 * limits.EXCHANGE_WANTS_MAX:
                all_lost.set()
        await stall(link)

    async def origin(chunk: ChunkId) -> bytes:
        await all_lost.wait()
        return version.chunks[chunk]

    hasty = replace(QUICK.picker, origin_patience_s=0.0, look_s=0.01, pause_s=0.01, pause_max_s=0.02)
    blobs = store(tmp_path / "me")
    async with node(1, boast) as boaster, node(2) as me:
        await fetch(version, plan_of(as_peer(boaster)), me, blobs, origin=origin, rules=replace(QUICK, picker=hasty))
    assert all_lost.is_set()
    assert holds_exactly(blobs, version.chunks)
