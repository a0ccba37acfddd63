"""Picking chunks and sources: everything is fetched or given up, by rules that spread the load."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.ids import ChunkId
from protocol.policy.chunks import chunk_id
from protocol.wire.frames import Reason
from swarm_node.picker.picker import Ask, Picker, TakeBack
from swarm_node.picker.sources import ChunkSource, PlanPace
from tests.swarm_node.picker_world import (
    CHUNKS,
    HTTP,
    PEER_A,
    PEER_C,
    RULES,
    SEEDER,
    STRIPES,
    asked_of,
    picker_for,
    taken_back_from,
)


def test_a_parent_is_asked_in_order_for_chunks_that_it_does_not_hold_yet() -> None:
    orders = picker_for(PEER_A, PEER_C, SEEDER).next(0.0)
    assert asked_of(orders, PEER_A) == CHUNKS[0::3]
    assert asked_of(orders, PEER_C) == CHUNKS[1::3]
    assert asked_of(orders, SEEDER) == CHUNKS[2::3][: RULES.window]


def test_no_source_has_more_to_answer_than_its_window() -> None:
    many = [chunk_id(number.to_bytes(2)) for number in range(100)]
    picker = picker_for(PEER_A, chunks=many)
    picker.had(PEER_A.name, many, 0.0)
    assert len(picker.next(0.0)) == RULES.window
    assert picker.next(0.0) == []
    waiting = picker_for(PEER_A, chunks=many)
    assert len(waiting.next(0.0)) == RULES.waits
    assert waiting.next(0.0) == []


def test_the_seeder_alone_delivers_everything() -> None:
    alone = ChunkSource("seeder", "seeder", range(STRIPES))
    picker = picker_for(alone)
    got = []
    while picker.missing:
        for order in picker.next(0.0):
            got.append(order.chunk)
            picker.delivered(order.source, order.chunk, 0.0)
    assert sorted(got) == sorted(CHUNKS)


def test_a_chunk_that_waits_is_taken_from_whoever_holds_it_once_its_parent_is_late() -> None:
    picker = picker_for(PEER_A, PEER_C, chunks=CHUNKS[:2])
    assert asked_of(picker.next(0.0), PEER_A) == [CHUNKS[0]]
    picker.delivered(PEER_C.name, CHUNKS[1], 0.1)
    picker.had(PEER_C.name, [CHUNKS[0]], 0.1)
    assert picker.next(0.2) == []
    assert picker.next(RULES.ahead_s + 0.1) == [TakeBack(PEER_A.name, CHUNKS[0])]
    picker.refused(PEER_A.name, CHUNKS[0], Reason.CANCELLED, RULES.ahead_s + 0.2)
    assert asked_of(picker.next(RULES.ahead_s + 0.2), PEER_C) == [CHUNKS[0]]


def test_the_rarest_chunk_is_taken_first() -> None:
    picker = picker_for(PEER_A, PEER_C, rules=replace(RULES, window=1, sample=100))
    picker.had(PEER_A.name, CHUNKS[0::3], 0.0)
    picker.had(PEER_C.name, [*CHUNKS[0:7:3], *CHUNKS[1::3]], 0.0)
    assert asked_of(picker.next(0.0), PEER_A) == [CHUNKS[9]]


def test_who_is_late_and_has_not_begun_is_told_that_another_is_asked() -> None:
    picker = late_picker()
    orders = picker.next(RULES.last_overdue_s)
    assert asked_of(orders, PEER_C) == CHUNKS[:1]
    assert taken_back_from(orders, PEER_A) == CHUNKS[:1]
    assert picker.delivered(PEER_C.name, CHUNKS[0], 1.5)
    assert taken_back_from(picker.next(1.5), PEER_A) == []
    assert not picker.delivered(PEER_A.name, CHUNKS[0], 1.6)


def late_picker() -> Picker:
    """One chunk, asked of its parent, who holds it and so does another."""
    picker = picker_for(PEER_A, PEER_C, chunks=CHUNKS[:1])
    picker.next(0.0)
    for peer in (PEER_A, PEER_C):
        picker.had(peer.name, CHUNKS[:1], 0.0)
    return picker


def test_lateness_is_counted_anew_from_the_first_bytes() -> None:
    picker = late_picker()
    picker.began(PEER_A.name, CHUNKS[0], 0.9)
    assert picker.next(RULES.last_overdue_s) == []
    orders = picker.next(0.9 + RULES.last_overdue_s)
    assert asked_of(orders, PEER_C) == CHUNKS[:1]
    assert taken_back_from(orders, PEER_A) == []  # too late to be taken back


def waiting_picker() -> tuple[Picker, float]:
    """One chunk was taken back from a parent that waits for it itself, for the other peer; and when."""
    patient = replace(RULES, first_word_s=2 * RULES.confirm_s)
    picker, now = picker_for(PEER_A, PEER_C, chunks=CHUNKS[:1], rules=patient), RULES.ahead_s + 0.1
    picker.next(0.0)
    picker.had(PEER_C.name, CHUNKS[:1], 0.0)
    assert taken_back_from(picker.next(now), PEER_A) == CHUNKS[:1]
    return picker, now


@pytest.mark.parametrize("told", [True, False])
def test_what_begins_to_come_after_it_was_taken_back_is_asked_of_nobody_else(told: bool) -> None:
    picker, now = waiting_picker()
    if told:
        picker.had(PEER_A.name, CHUNKS[:1], now + 0.1)
    now += RULES.confirm_s
    assert picker.began(PEER_A.name, CHUNKS[0], now)
    assert picker.next(now + 0.1) == []
    assert picker.delivered(PEER_A.name, CHUNKS[0], now + 0.2)


def test_who_was_not_asked_yet_is_not_asked_when_another_takes_over() -> None:
    many = [chunk_id(number.to_bytes(2)) for number in range(30)]
    picker = picker_for(PEER_A, PEER_C, chunks=many, blames={PEER_C.name: 1})  # so that it comes after the other
    picker.next(0.0)
    for number in (1, 4, 7):
        picker.delivered(PEER_C.name, many[number], 0.1 * number)
    planned_next = many[0::STRIPES][RULES.waits]
    picker.had(PEER_C.name, [planned_next], 0.9)
    picker.delivered(PEER_A.name, many[0], 1.0)
    orders = picker.next(1.0)
    assert asked_of(orders, PEER_C)[:1] == [planned_next]
    assert planned_next not in asked_of(orders, PEER_A) + taken_back_from(orders, PEER_A)


def test_a_parent_that_does_not_confirm_holds_nobody_up() -> None:
    picker, now = waiting_picker()
    assert asked_of(picker.next(now + RULES.confirm_s - 0.01), PEER_C) == []
    assert asked_of(picker.next(now + RULES.confirm_s), PEER_C) == CHUNKS[:1]


def test_what_was_kept_for_a_source_that_failed_is_open_to_others() -> None:
    picker, now = waiting_picker()
    picker.failed(PEER_C.name, now)
    picker.refused(PEER_A.name, CHUNKS[0], Reason.CANCELLED, now)
    assert asked_of(picker.next(now + 0.01), PEER_A) == CHUNKS[:1]


def test_a_source_is_never_asked_for_what_it_still_owes() -> None:
    picker, now = waiting_picker()
    picker.failed(PEER_C.name, now)
    picker.had(PEER_A.name, CHUNKS[:1], now)
    assert picker.next(now + 0.01) == []


def test_at_the_end_who_has_nothing_to_do_takes_over_what_waits_for_its_turn_elsewhere() -> None:
    both = [replace(PEER_A, stripes=(0, 1, 2)), ChunkSource("d", "peer")]
    picker = Picker(CHUNKS[:2], CHUNKS[:2], both, stripes=STRIPES, rng=Random(1), now=0.0)
    picker.next(0.0)
    picker.had(PEER_A.name, CHUNKS[:2], 0.0)
    picker.began(PEER_A.name, CHUNKS[0], 0.1)
    picker.had("d", CHUNKS[:2], 0.1)
    assert picker.next(0.1) == [TakeBack(PEER_A.name, CHUNKS[1])]
    picker.refused(PEER_A.name, CHUNKS[1], Reason.CANCELLED, 0.2)
    assert picker.next(0.2) == [Ask("d", CHUNKS[1])]


def test_what_is_kept_for_a_source_that_is_asked_for_it_early_is_not_asked_again() -> None:
    """The chunk began to come after all, and stalled: its heir is asked as for anything late, and only once."""
    both = [replace(PEER_A, stripes=(0, 1, 2)), ChunkSource("d", "peer")]
    picker = Picker(CHUNKS[:2], CHUNKS[:2], both, stripes=STRIPES, rng=Random(1), now=0.0)
    picker.next(0.0)
    picker.had(PEER_A.name, CHUNKS[:2], 0.0)
    picker.began(PEER_A.name, CHUNKS[0], 0.1)
    picker.had("d", CHUNKS[:2], 0.1)
    assert picker.next(0.1) == [TakeBack(PEER_A.name, CHUNKS[1])]
    picker.delivered(PEER_A.name, CHUNKS[0], 0.2)
    picker.began(PEER_A.name, CHUNKS[1], 0.2)
    asked = [chunk for tenths in range(3, 40) for chunk in asked_of(picker.next(tenths / 10), ChunkSource("d", "peer"))]
    assert asked == [CHUNKS[1]]


def test_a_want_is_taken_back_once_however_often_others_refuse_the_chunk() -> None:
    picker, taken_back = picker_for(PEER_A, PEER_C, chunks=CHUNKS[:1]), 0
    picker.next(0.0)  # asks the parent, which does not hold it
    for turn in range(1, 50):
        now = float(turn)
        picker.had(PEER_C.name, CHUNKS[:1], now)
        orders = picker.next(now)
        taken_back += len(taken_back_from(orders, PEER_A))
        if asked_of(orders, PEER_C):
            picker.refused(PEER_C.name, CHUNKS[0], Reason.BUSY, now)
    assert taken_back == 1


def test_a_holder_that_turns_out_to_have_nothing_is_not_counted_as_another_copy() -> None:
    picker = picker_for(PEER_A, PEER_C)
    for now in range(5):
        picker.had(PEER_A.name, CHUNKS[:1], float(now))
        picker.refused(PEER_A.name, CHUNKS[0], Reason.ABSENT, float(now))
    assert picker._copies[CHUNKS[0]] == 0


def test_stripes_are_counted_over_the_whole_version_whatever_is_missing() -> None:
    picker = Picker(CHUNKS, CHUNKS[4:], [PEER_A, PEER_C], stripes=STRIPES, rng=Random(1), now=0.0)
    assert asked_of(picker.next(0.0), PEER_C) == CHUNKS[4::3]


def test_a_parent_that_has_nothing_pauses_longer_each_time_and_the_seeder_takes_over() -> None:
    picker = picker_for(PEER_A, SEEDER, chunks=CHUNKS[:1])
    now, pauses = 0.0, []
    for _ in range(4):
        for order in picker.next(now):
            picker.refused(order.source, order.chunk, Reason.ABSENT, now)
        began = now
        while not picker.next(now) and now < 3.0:
            now += 0.01
        pauses.append(now - began)
        picker.refused(PEER_A.name, CHUNKS[0], Reason.CANCELLED, now)
    assert pauses[0] < pauses[1] < pauses[2]
    assert asked_of(picker_after_refusals(), SEEDER) == CHUNKS[:1]


def picker_after_refusals() -> list[Ask | TakeBack]:
    picker = picker_for(PEER_A, SEEDER, chunks=CHUNKS[:1])
    for order in picker.next(0.0):
        picker.refused(order.source, order.chunk, Reason.ABSENT, 0.0)
    return picker.next(10.0)


def test_a_late_answer_is_asked_of_one_other_source_at_a_time() -> None:
    picker = picker_for(
        PEER_A, PEER_C, ChunkSource("d", "peer"), rules=replace(RULES, waits=2)
    )  # so not all is asked of A
    picker.next(0.0)
    for source in ("a-peer", "c-peer", "d"):
        picker.had(source, CHUNKS[:1], 0.0)
    picker.began(PEER_A.name, CHUNKS[0], 0.0)
    asked_at = []
    for now in (0.1, 2.9, 3.0, 3.1, 5.9, 6.0, 6.1, 9.0):
        asked = [order for order in picker.next(now) if isinstance(order, Ask) and order.chunk == CHUNKS[0]]
        asked_at += [now] * len(asked)
    assert asked_at == [3.0, 6.0]


def test_what_a_failed_source_owed_is_asked_elsewhere() -> None:
    picker = picker_for(PEER_A, SEEDER)
    owed = asked_of(orders := picker.next(0.0), PEER_A)
    for chunk in asked_of(orders, SEEDER):
        picker.delivered(SEEDER.name, chunk, 0.0)
    for now in range(RULES.strikes_max):
        picker.failed(PEER_A.name, float(now))
    taken: list[ChunkId] = []
    now_s = 10.0
    while picker.missing and now_s < 30:
        for chunk in asked_of(picker.next(now_s), SEEDER):
            taken.append(chunk)
            picker.delivered(SEEDER.name, chunk, now_s)
        now_s += RULES.look_s
    assert set(owed) <= set(taken)


def test_it_is_given_up_when_nobody_has_delivered_for_long_and_not_because_all_failed() -> None:
    picker, now = picker_for(PEER_A, SEEDER), 0.0
    while now < RULES.give_up_s:
        assert not picker.hopeless(now)
        for source in (PEER_A, SEEDER):
            picker.failed(source.name, now)
        now += 2.0
    assert picker.hopeless(now)


def test_it_is_given_up_at_once_when_all_have_lied() -> None:
    picker = picker_for(PEER_A, SEEDER)
    picker.lied(PEER_A.name, 0.0)
    assert not picker.hopeless(0.0)
    picker.lied(SEEDER.name, 0.0)
    assert picker.hopeless(0.0)


def test_a_liar_is_never_asked_again() -> None:
    picker = picker_for(PEER_A, PEER_C)
    picker.next(0.0)
    picker.lied(PEER_A.name, 0.0)
    for now in (0.0, 1.0, 100.0):
        assert asked_of(picker.next(now), PEER_A) == []


def test_among_equals_the_least_blamed_is_asked_first() -> None:
    both = [replace(PEER_A, stripes=(0, 1, 2)), replace(PEER_C, stripes=(0, 1, 2))]
    picker = Picker(CHUNKS[:2], CHUNKS[:2], both, stripes=3, rng=Random(1), now=0.0, blames={PEER_A.name: 2})
    assert asked_of(picker.next(0.0), PEER_A) == []


def test_the_origin_is_asked_for_what_the_seeder_lacks() -> None:
    picker = picker_for(SEEDER, HTTP)
    first = asked_of(orders := picker.next(0.0), SEEDER)
    assert asked_of(orders, HTTP) == []
    picker.refused(SEEDER.name, first[0], Reason.ABSENT, 0.0)
    assert asked_of(picker.next(0.0), HTTP) == [first[0]]


def test_the_origin_is_asked_when_nobody_else_is_left_or_delivers() -> None:
    picker = picker_for(SEEDER, HTTP)
    picker.next(0.0)
    assert len(asked_of(picker.next(RULES.origin_patience_s), HTTP)) == RULES.window
    alone = picker_for(HTTP)
    assert len(alone.next(0.0)) == RULES.window


def test_the_origin_is_asked_before_all_hope_is_lost_where_chunks_have_far_to_go() -> None:
    picker = picker_for(SEEDER, HTTP, pace=PlanPace(hop_s=30.0, lag_s=60.0))
    picker.next(0.0)
    last_resort_s = 60.0 + RULES.origin_patience_s
    assert not picker.hopeless(last_resort_s)
    assert asked_of(picker.next(last_resort_s), HTTP)
    assert picker.hopeless(60.0 + RULES.give_up_s)


def test_nothing_missing_means_nothing_to_do() -> None:
    picker = picker_for(SEEDER, chunks=[])
    assert picker.missing == 0
    assert picker.next(0.0) == []
    assert not picker.hopeless(10**9)


def test_no_source_at_all_is_hopeless_at_once() -> None:
    assert picker_for().hopeless(0.0)


HABITS = ["delivers", "absent", "busy", "fails", "lies", "parts"]


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(0, 30), st.integers(0, 4), st.booleans(), st.booleans())
def test_whatever_sources_do_it_ends_with_every_chunk_or_without_hope(
    chance: Random, chunk_count: int, peer_count: int, seeder: bool, origin: bool
) -> None:
    """Plays all sources by dice: each answer, refusal, failure and lie comes at some time, in some order."""
    chunks = [chunk_id(number.to_bytes(2)) for number in range(chunk_count)]
    sources = [ChunkSource(f"peer-{number}", "peer", (number % STRIPES,)) for number in range(peer_count)]
    sources += [SEEDER] * seeder + [HTTP] * origin
    picker = picker_for(*sources, chunks=chunks)
    habits = {source.name: chance.choice([*HABITS, "any"]) for source in sources}
    open_wants: dict[str, list[ChunkId]] = {source.name: [] for source in sources}
    delivered: set[ChunkId] = set()
    now = progress_at = 0.0
    for source in sources[:peer_count]:
        if habits[source.name] == "delivers":
            picker.had(source.name, chunks, now)
    for _ in range(5000):
        if not picker.missing or picker.hopeless(now):
            break
        for order in picker.next(now):
            wants = open_wants[order.source]
            if isinstance(order, TakeBack):
                if order.chunk in wants and chance.random() < 0.5:  # or it crosses the chunk on its way
                    wants.remove(order.chunk)
                    picker.refused(order.source, order.chunk, Reason.CANCELLED, now)
                continue
            assert order.chunk not in delivered
            assert order.chunk not in wants
            wants.append(order.chunk)
            assert len(wants) <= RULES.window_max + RULES.waits
        busy = [name for name, wants in open_wants.items() if wants]
        if not busy:
            assert picker.wake_at(now) > now
            now = picker.wake_at(now)
            continue
        honest = [name for name in busy if habits[name] == "delivers"]
        is_time = now >= progress_at + RULES.give_up_s / 2  # who delivers does so before anybody gives up
        name = chance.choice(honest if honest and is_time else busy)
        habit = habits[name] if habits[name] != "any" else chance.choice(HABITS)
        now += chance.random() * chance.choice([0.01, RULES.overdue_s])
        if chance.random() < 0.3:
            picker.began(name, chance.choice(open_wants[name]), now)
        elif habit == "delivers":
            chunk = open_wants[name].pop()
            assert picker.delivered(name, chunk, now) is (chunk not in delivered)
            delivered.add(chunk)
            progress_at = now
        elif habit in ("absent", "busy"):
            picker.refused(name, open_wants[name].pop(0), Reason[habit.upper()], now)
        else:
            open_wants[name].clear()
            {"fails": picker.failed, "lies": picker.lied, "parts": picker.parted}[habit](name, now)
    else:
        pytest.fail("it did not end")
    assert picker.hopeless(now) or delivered == set(chunks)
    if "delivers" in habits.values():
        assert delivered == set(chunks)


def test_in_a_small_swarm_nobody_waits_for_a_plan_that_takes_links_for_slow() -> None:
    assert PlanPace.from_plan(65_536, stripes=16, rate=1e3, hops=2, help_rate=0.0) == PlanPace()


def test_in_a_large_swarm_the_seeder_is_asked_beyond_its_part_as_often_as_the_plan_allows() -> None:
    pace = PlanPace.from_plan(1000, stripes=16, rate=16_000, hops=4, help_rate=500)
    assert (pace.hop_s, pace.lag_s, pace.help_s) == (1.0, 2.0, 2.0)
