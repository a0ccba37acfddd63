"""Picking chunks and sources: everything is fetched or given up, by rules that spread the load."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.chunks import chunk_id
from protocol.exchange import Reason
from protocol.ids import ChunkId, NodeId
from swarm_node.picker import ORIGIN, Assignment, Picker, PickerRules, Source

ME = NodeId("b-me")
PEER_A, PEER_C = Source("a-peer", "peer"), Source("c-peer", "peer")
SEEDER, HTTP = Source("seeder", "seeder"), Source(ORIGIN, "origin")
CHUNKS = [chunk_id(bytes([number])) for number in range(12)]
RULES = PickerRules(window=2)


def picker_for(*sources: Source, chunks: list[ChunkId] = CHUNKS, me: NodeId = ME) -> Picker:
    return Picker(chunks, sources, me=me, rng=Random(1), now=0.0, rules=RULES)


def asked_of(assignments: list[Assignment], source: Source) -> list[ChunkId]:
    return [assignment.chunk for assignment in assignments if assignment.source == source.name]


def test_nodes_ask_the_seeder_for_different_chunks_first() -> None:
    everyone = [Source(f"node-{number}", "peer") for number in range(3)]
    firsts = [asked_of(picker_for(*everyone, SEEDER, me=NodeId(node.name)).next(0.0), SEEDER) for node in everyone]
    assert [chunk for first in firsts for chunk in first] == [CHUNKS[at] for at in (0, 1, 4, 5, 8, 9)]


def test_a_peer_is_asked_for_its_own_share_first() -> None:
    assignments = picker_for(PEER_A, PEER_C, SEEDER).next(0.0)
    assert asked_of(assignments, PEER_A) == CHUNKS[0:2]
    assert asked_of(assignments, SEEDER) == CHUNKS[4:6]
    assert asked_of(assignments, PEER_C) == CHUNKS[8:10]


def test_no_source_has_more_to_answer_than_its_window() -> None:
    picker = picker_for(PEER_A, PEER_C, SEEDER, HTTP)
    assert len(picker.next(0.0)) == 3 * RULES.window
    assert picker.next(0.0) == []


def test_the_seeder_alone_delivers_everything() -> None:
    picker = picker_for(SEEDER)
    got = []
    while picker.missing:
        for assignment in picker.next(0.0):
            got.append(assignment.chunk)
            picker.delivered(assignment.source, assignment.chunk, 0.0)
    assert sorted(got) == sorted(CHUNKS)


def play_until_only_peers_are_waited_for(picker: Picker, *, peers_refuse: bool) -> None:
    """The seeder delivers all it is asked for; the peers owe their answers, or have nothing."""
    while assignments := picker.next(0.0):
        for assignment in assignments:
            if assignment.source == SEEDER.name:
                picker.delivered(SEEDER.name, assignment.chunk, 0.0)
            elif peers_refuse:
                picker.refused(assignment.source, assignment.chunk, Reason.ABSENT, 0.0)


def test_beyond_our_share_the_seeder_is_asked_when_peers_owe_answers_for_too_long() -> None:
    rules = replace(RULES, overdue_s=100.0)
    picker = Picker(CHUNKS, [PEER_A, SEEDER], me=ME, rng=Random(1), now=0.0, rules=rules)
    play_until_only_peers_are_waited_for(picker, peers_refuse=False)
    assert picker.missing == len(CHUNKS) // 2
    assert asked_of(picker.next(RULES.busy_patience_s - 0.1), SEEDER) == []
    assert len(asked_of(picker.next(RULES.busy_patience_s), SEEDER)) == RULES.window


def test_beyond_our_share_the_seeder_is_asked_sooner_when_no_peer_owes_anything() -> None:
    picker = picker_for(PEER_A, SEEDER)
    play_until_only_peers_are_waited_for(picker, peers_refuse=True)
    assert picker.missing == len(CHUNKS) // 2
    picker.failed(PEER_A.name, RULES.patience_s - 0.1)  # pauses, so that it owes nothing
    assert asked_of(picker.next(RULES.patience_s - 0.1), SEEDER) == []
    assert len(asked_of(picker.next(RULES.patience_s), SEEDER)) == RULES.window


def test_an_absent_chunk_is_asked_again_after_a_pause_that_grows() -> None:
    picker = picker_for(PEER_A)
    now, pauses = 0.0, []
    for _ in range(4):
        for assignment in picker.next(now):
            picker.refused(assignment.source, assignment.chunk, Reason.ABSENT, now)
        assert picker.next(now) == []
        pauses.append(picker.wake_at(now) - now)
        now = picker.wake_at(now)
    assert pauses == sorted(pauses)
    assert pauses[0] < 0.05 < pauses[-1]


def test_a_pausing_source_is_probed_with_one_chunk_only() -> None:
    picker = picker_for(PEER_A)
    first = picker.next(0.0)
    picker.refused(PEER_A.name, first[0].chunk, Reason.ABSENT, 0.0)
    picker.refused(PEER_A.name, first[1].chunk, Reason.ABSENT, 0.0)
    probe = picker.next(1.0)
    assert len(probe) == 1
    assert probe[0].chunk not in {assignment.chunk for assignment in first}  # it may have others by now
    picker.delivered(PEER_A.name, probe[0].chunk, 1.0)
    assert len(picker.next(1.0)) == RULES.window


def test_a_late_chunk_is_asked_of_a_second_source_when_nothing_else_is_left() -> None:
    picker = picker_for(PEER_A, PEER_C, chunks=CHUNKS[:3])
    first = picker.next(0.0)
    assert len(first) == 3
    slow = asked_of(first, PEER_A)
    for chunk in asked_of(first, PEER_C):
        picker.delivered(PEER_C.name, chunk, 0.0)
    assert picker.next(RULES.overdue_s - 0.1) == []
    assert picker.wake_at(RULES.overdue_s - 0.1) <= RULES.overdue_s
    assert asked_of(picker.next(RULES.overdue_s), PEER_C) == slow
    assert picker.next(2 * RULES.overdue_s) == []  # two are enough
    assert picker.delivered(PEER_C.name, slow[0], 7.0)
    assert not picker.delivered(PEER_A.name, slow[0], 8.0)


def test_what_a_failed_source_owed_is_asked_elsewhere() -> None:
    picker = picker_for(PEER_A, PEER_C)
    first = picker.next(0.0)
    owed = asked_of(first, PEER_A)
    picker.failed(PEER_A.name, 0.0)
    for chunk in asked_of(first, PEER_C):
        picker.delivered(PEER_C.name, chunk, 0.0)
    taken = []
    while more := asked_of(picker.next(0.0), PEER_C):
        taken += more
        for chunk in more:
            picker.delivered(PEER_C.name, chunk, 0.0)
    assert set(owed) <= set(taken)


def test_a_source_is_given_up_after_so_many_failures_in_a_row() -> None:
    picker, now = picker_for(PEER_A), 0.0
    for _ in range(RULES.strikes_max):
        assert not picker.hopeless(now)
        assert picker.next(now)
        picker.failed(PEER_A.name, now)
        now += 10.0
    assert picker.next(now) == []
    assert picker.hopeless(now)


def test_a_liar_is_never_asked_again() -> None:
    picker = picker_for(PEER_A, PEER_C)
    picker.next(0.0)
    picker.lied(PEER_A.name, 0.0)
    for now in (0.0, 1.0, 100.0):
        assert asked_of(picker.next(now), PEER_A) == []


def test_among_equals_the_least_blamed_is_asked_first() -> None:
    picker = Picker(CHUNKS[:2], [PEER_A, PEER_C], me=ME, rng=Random(1), now=0.0, rules=RULES, blames={PEER_A.name: 2})
    assert asked_of(picker.next(0.0), PEER_A) == []


def test_the_origin_is_asked_for_what_the_seeder_lacks() -> None:
    picker = picker_for(SEEDER, HTTP)
    first = picker.next(0.0)
    assert asked_of(first, HTTP) == []
    picker.refused(SEEDER.name, first[0].chunk, Reason.ABSENT, 0.0)
    assert asked_of(picker.next(0.0), HTTP) == [first[0].chunk]


def test_the_origin_is_asked_when_nobody_else_is_left_or_delivers() -> None:
    picker = picker_for(SEEDER, HTTP)
    picker.next(0.0)
    assert len(asked_of(picker.next(RULES.origin_patience_s), HTTP)) == RULES.window
    alone = picker_for(HTTP)
    assert len(alone.next(0.0)) == RULES.window


def test_nothing_missing_means_nothing_to_do() -> None:
    picker = picker_for(SEEDER, chunks=[])
    assert picker.missing == 0
    assert picker.next(0.0) == []
    assert not picker.hopeless(10**9)


def test_this_node_and_duplicates_in_the_plan_are_no_sources() -> None:
    picker = picker_for(Source(ME, "peer"), PEER_A, PEER_A)
    assert {assignment.source for assignment in picker.next(0.0)} == {PEER_A.name}


def test_no_source_at_all_is_hopeless_at_once() -> None:
    assert picker_for().hopeless(0.0)


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(0, 30), st.integers(0, 4), st.booleans(), st.booleans())
def test_whatever_sources_do_it_ends_with_every_chunk_or_without_hope(
    chance: Random, chunk_count: int, peer_count: int, seeder: bool, origin: bool
) -> None:
    """Plays all sources by dice: each answer, refusal, failure and lie comes at some time, in some order."""
    chunks = [chunk_id(number.to_bytes(2)) for number in range(chunk_count)]
    sources = [Source(f"peer-{number}", "peer") for number in range(peer_count)]
    sources += [SEEDER] * seeder + [HTTP] * origin
    picker = Picker(chunks, sources, me=ME, rng=Random(7), now=0.0, rules=RULES)
    habits = {source.name: chance.choice(["delivers", "absent", "fails", "lies", "any"]) for source in sources}
    open_wants: dict[str, list[ChunkId]] = {source.name: [] for source in sources}
    delivered: set[ChunkId] = set()
    now = 0.0
    for _ in range(5000):
        if not picker.missing or picker.hopeless(now):
            break
        for assignment in picker.next(now):
            assert assignment.chunk not in delivered
            assert sum(assignment.chunk in wants for wants in open_wants.values()) <= 1
            assert assignment.chunk not in open_wants[assignment.source]
            open_wants[assignment.source].append(assignment.chunk)
            assert len(open_wants[assignment.source]) <= RULES.window
        busy = [name for name, wants in open_wants.items() if wants]
        if not busy:
            assert picker.wake_at(now) > now
            now = picker.wake_at(now)
            continue
        name = chance.choice(busy)
        habit = habits[name] if habits[name] != "any" else chance.choice(["delivers", "absent", "fails", "lies"])
        now += chance.random() * chance.choice([0.01, RULES.overdue_s])
        if habit == "delivers":
            chunk = open_wants[name].pop()
            assert picker.delivered(name, chunk, now) is (chunk not in delivered)
            delivered.add(chunk)
        elif habit == "absent":
            picker.refused(name, open_wants[name].pop(0), Reason.ABSENT, now)
        else:
            open_wants[name].clear()
            (picker.lied if habit == "lies" else picker.failed)(name, now)
    else:
        pytest.fail("it did not end")
    assert picker.hopeless(now) or delivered == set(chunks)
    if "delivers" in habits.values():
        assert delivered == set(chunks)
