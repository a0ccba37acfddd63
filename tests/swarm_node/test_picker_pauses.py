"""When a source is left alone, for how long, and when for good."""

from dataclasses import replace

from protocol.frames import Reason
from swarm_node.picker import Ask, TakeBack
from tests.swarm_node.picker_world import CHUNKS, HTTP, PEER_A, RULES, asked_of, picker_for


def test_who_hangs_up_with_nothing_to_do_is_never_given_up() -> None:
    picker, now = picker_for(PEER_A), 0.0
    for _ in range(10 * RULES.strikes_max):
        picker.parted(PEER_A.name, now)
        assert not picker.is_able(PEER_A.name, now)
        now += 2 * RULES.pause_max_s
        assert picker.is_able(PEER_A.name, now)


def test_who_hangs_up_again_and_again_instead_of_sending_what_it_owes_is_given_up() -> None:
    picker, now = picker_for(PEER_A), 0.0
    for _ in range(RULES.strikes_max):
        assert picker.next(now)
        picker.parted(PEER_A.name, now)
        now += 100.0
    assert not picker.is_able(PEER_A.name, now)


def test_who_failed_is_worth_a_connection_after_a_pause_until_it_is_given_up() -> None:
    picker, able = picker_for(PEER_A), list[bool]()
    for number in range(RULES.strikes_max):
        picker.failed(PEER_A.name, 100.0 * number)
        able += [picker.is_able(PEER_A.name, 100.0 * number + wait_s) for wait_s in (0.0, 50.0)]
    assert able == [False, True] * (RULES.strikes_max - 1) + [False, False]


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
        assert not picker.hopeless(now)
        orders = picker.next(now)
        assert len(orders) == RULES.window
        for order in orders:
            picker.refused(order.source, order.chunk, Reason.BUSY, now)
        now += 10.0
    assert picker.hopeless(now)


def test_what_was_kept_for_an_origin_that_is_given_up_is_open_to_others() -> None:
    """Of two chunks nobody is planned to send the second; the origin gets it, and shall get the first."""
    picker, now = picker_for(PEER_A, HTTP, chunks=CHUNKS[:2], rules=replace(RULES, strikes_max=1)), 10.0
    assert picker.next(0.0) == [Ask(PEER_A.name, CHUNKS[0])]
    assert set(picker.next(now)) == {Ask(HTTP.name, CHUNKS[1]), TakeBack(PEER_A.name, CHUNKS[0])}
    picker.refused(HTTP.name, CHUNKS[1], Reason.BUSY, now)
    picker.refused(PEER_A.name, CHUNKS[0], Reason.CANCELLED, now)
    assert asked_of(picker.next(now), PEER_A) == [CHUNKS[0]]
