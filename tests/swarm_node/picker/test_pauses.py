"""Pauses of a source: when it is left alone, and for how long; when nobody counts on it or ever asks it again."""

from dataclasses import replace

from protocol.policy.chunks import chunk_id
from protocol.wire.frames import Reason
from swarm_node.picker.picker import Ask, Picker, TakeBack
from tests.swarm_node.picker_world import CHUNKS, HTTP, PEER_A, PEER_C, RULES, asked_of, picker_for

LONGEST_S = 1.25 * RULES.failure_pause_max_s


def pauses_s(picker: Picker, times: int) -> list[float]:
    """Return how long a source is left alone after each of so many failures."""
    now, found = 0.0, []
    for _ in range(times):
        picker.failed(PEER_A.name, now)
        began = now
        while not picker.is_able(PEER_A.name, now):
            now += 0.01
        found.append(now - began)
    return found


def test_who_hangs_up_with_nothing_to_do_is_asked_for_all_it_can_send_when_it_is_back() -> None:
    picker, now = picker_for(PEER_A), 0.0
    for _ in range(10 * RULES.strikes_max):
        picker.parted(PEER_A.name, now)
        assert not picker.is_able(PEER_A.name, now)
        now += 2 * RULES.pause_max_s
        assert picker.is_able(PEER_A.name, now)
    assert len(picker.next(now)) == RULES.waits


def test_who_hangs_up_again_and_again_instead_of_sending_what_it_owes_has_failed() -> None:
    picker, now = picker_for(PEER_A), 0.0
    for _ in range(RULES.strikes_max):
        assert len(picker.next(now)) == RULES.waits
        picker.parted(PEER_A.name, now)
        now += LONGEST_S
    assert len(picker.next(now)) == 1


def test_a_failure_is_followed_by_a_pause_that_grows_up_to_a_limit_and_by_another_try() -> None:
    """A parent that restarts for an upgrade is away for half a minute, and its children have it back soon after."""
    found = pauses_s(picker_for(PEER_A), 40)
    assert found[0] < found[1] < found[2] < found[3]
    assert max(found) <= LONGEST_S + 0.01
    assert min(found[10:]) >= 0.75 * RULES.failure_pause_max_s


def test_who_failed_too_often_comes_last_and_is_asked_for_one_chunk_until_it_delivers_one() -> None:
    both = [replace(PEER_A, stripes=(0, 1, 2)), replace(PEER_C, stripes=(0, 1, 2))]
    picker, now = picker_for(*both, rules=replace(RULES, waits=2)), 0.0
    picker.had(PEER_C.name, CHUNKS, now)
    for _ in range(RULES.strikes_max):
        picker.failed(PEER_A.name, now)
        now += LONGEST_S
    orders = picker.next(now)
    assert orders[: RULES.window] == [Ask(PEER_C.name, chunk) for chunk in asked_of(orders, PEER_C)[: RULES.window]]
    (tried,) = asked_of(orders, PEER_A)
    assert asked_of(picker.next(now + 0.01), PEER_A) == []
    picker.delivered(PEER_A.name, tried, now + 0.02)
    assert len(asked_of(picker.next(now + 0.02), PEER_A)) == 2


def test_the_pause_after_a_failure_is_short_again_once_a_source_has_delivered() -> None:
    picker = picker_for(PEER_A)
    pauses_s(picker, 10)
    picker.delivered(PEER_A.name, CHUNKS[0], 200.0)
    picker.failed(PEER_A.name, 200.0)
    assert picker.is_able(PEER_A.name, 200.0 + 1.25 * RULES.failure_pause_s)


def test_the_origin_brings_everything_as_fast_as_it_can_while_nobody_else_can_be_counted_on() -> None:
    picker, now = picker_for(PEER_A, HTTP), 0.0
    for _ in range(RULES.strikes_max):
        picker.failed(PEER_A.name, now)
    asked = asked_of(picker.next(now), HTTP)
    assert len(asked) == RULES.window
    for chunk in asked:
        picker.delivered(HTTP.name, chunk, now)
    assert len(asked_of(picker.next(now), HTTP)) == RULES.window


def test_pauses_grow_no_longer_than_so_long_however_often_a_source_refuses() -> None:
    picker, now = picker_for(PEER_A), 0.0
    for _ in range(2000):
        orders = picker.next(now)
        assert orders
        for order in orders:
            picker.refused(order.source, order.chunk, Reason.BUSY, now)
        now += 2 * RULES.pause_max_s


def test_requests_of_the_origin_that_fail_in_one_outage_count_once() -> None:
    picker, now = picker_for(HTTP), 0.0
    for _ in range(RULES.strikes_max):
        orders = picker.next(now)
        assert len(orders) == RULES.window
        for order in orders:
            picker.refused(order.source, order.chunk, Reason.BUSY, now)
        now += 10.0
    assert len(picker.next(now)) == 1


def test_what_was_kept_for_an_origin_that_failed_is_open_to_others() -> None:
    """Two chunks: nobody is planned to send the second; the origin gets it, and shall get the first."""
    rules = replace(RULES, strikes_max=1, first_word_s=60.0)
    picker, now = picker_for(PEER_A, HTTP, chunks=CHUNKS[:2], rules=rules), 10.0
    assert picker.next(0.0) == [Ask(PEER_A.name, CHUNKS[0])]
    assert set(picker.next(now)) == {Ask(HTTP.name, CHUNKS[1]), TakeBack(PEER_A.name, CHUNKS[0])}
    picker.refused(HTTP.name, CHUNKS[1], Reason.BUSY, now)
    picker.refused(PEER_A.name, CHUNKS[0], Reason.CANCELLED, now)
    assert asked_of(picker.next(now), PEER_A) == [CHUNKS[0]]


def test_of_a_parent_that_lacks_some_of_its_part_the_rest_is_asked_before_that_again() -> None:
    """One that tells nothing of what it holds, as it may: it was asked for the same first few for ever."""
    part = [chunk_id(bytes([number])) for number in range(3 * RULES.waits)]
    picker, now = picker_for(replace(PEER_A, stripes=(0, 1, 2)), chunks=part), 0.0
    held, got = set(part[RULES.waits :]), set[str]()
    for _ in range(len(part)):
        for chunk in asked_of(picker.next(now), PEER_A):
            if chunk in held:
                picker.delivered(PEER_A.name, chunk, now)
                got.add(chunk)
            else:
                picker.refused(PEER_A.name, chunk, Reason.ABSENT, now)
        now += 2 * RULES.pause_max_s
    assert got == held
