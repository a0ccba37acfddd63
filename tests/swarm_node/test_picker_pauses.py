"""When a source is left alone, for how long, and when for good."""

from protocol.frames import Reason
from tests.swarm_node.picker_world import PEER_A, RULES, picker_for


def test_who_hangs_up_with_nothing_to_do_is_never_given_up() -> None:
    picker, now = picker_for(PEER_A), 0.0
    for _ in range(10 * RULES.strikes_max):
        assert picker.next(now)
        picker.parted(PEER_A.name, now)
        assert not picker.is_able(PEER_A.name, now)
        now += 2 * RULES.pause_max_s
        assert picker.is_able(PEER_A.name, now)


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
