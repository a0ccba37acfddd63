"""Number of groups that a node may hold: doubled by an answer, lowered by a timeout, and bounded by measurements."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rules.lease_allowance import MEASURED_MIN, MISSED_MAX, allowance_after, groups_in_time, wait_ms
from protocol.work.lease import LeaseEvent

MOST = 16


@dataclass(frozen=True)
class Lease:
    issued_ms: int
    ended_ms: int


@pytest.mark.parametrize(
    ("before", "event", "after"),
    [
        (1, LeaseEvent.ACCEPT, 2),
        (12, LeaseEvent.ACCEPT, MOST),
        (MOST, LeaseEvent.ACCEPT, MOST),
        (MOST, LeaseEvent.EXPIRE, MOST - 1),
        (2, LeaseEvent.SKIP, 1),
        (1, LeaseEvent.REJECT, 1),  # never none: it could not show that it is better now
        (1, LeaseEvent.EXPIRE, 0),
        (0, LeaseEvent.EXPIRE, -1),
        (-1, LeaseEvent.SKIP, -1),
        (-1, LeaseEvent.ACCEPT, 2),
        (-MISSED_MAX, LeaseEvent.EXPIRE, -MISSED_MAX),
        (64, LeaseEvent.EXPIRE, MOST - 1),  # the operator has lowered the most
        (5, LeaseEvent.CANCEL, 5),
    ],
)
def test_allowance_by_hand(before: int, event: LeaseEvent, after: int) -> None:
    assert allowance_after(before, event, most=MOST) == after


@given(st.integers(1, 64), st.lists(st.sampled_from(LeaseEvent)))
def test_whatever_happens_an_allowance_stays_within_its_bounds(first: int, events: list[LeaseEvent]) -> None:
    allowance = first
    for event in events:
        allowance = allowance_after(allowance, event, most=MOST)
        assert -MISSED_MAX <= allowance <= max(first, MOST)


@given(st.integers(1, MOST))
def test_a_node_that_lets_all_it_holds_expire_at_once_need_not_wait(first: int) -> None:
    allowance = first
    for _ in range(first):
        allowance = allowance_after(allowance, LeaseEvent.EXPIRE, most=MOST)
    assert allowance == 0
    assert not wait_ms(-allowance, timeout_ms=10)


def test_lease_griefing_waits_twice_as_long_each_time_up_to_a_most() -> None:
    assert [wait_ms(misses, timeout_ms=10) for misses in (-1, 0, 1, 2, 3, MISSED_MAX, 100)] == [
        0, 0, 10, 20, 40, 320, 320,
    ]  # fmt: skip


def test_before_enough_leases_have_ended_nothing_is_known() -> None:
    assert groups_in_time([Lease(0, 10)] * (MEASURED_MIN - 1), timeout_ms=1000) is None
    assert groups_in_time([Lease(5, 5)] * MEASURED_MIN, timeout_ms=1000) is None, "who takes no time is not bounded"


def test_groups_that_were_sampled_together_count_for_the_time_they_took_together() -> None:
    assert groups_in_time([Lease(0, 100)] * 8, timeout_ms=1000) == 40
    assert groups_in_time([Lease(100 * n, 100 * n + 100) for n in range(8)], timeout_ms=1000) == 5


def test_idle_time_does_not_count() -> None:
    rested = [Lease(1000 * n, 1000 * n + 100) for n in range(8)]
    assert groups_in_time(rested, timeout_ms=1000) == 5


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(-10, 10**6)), max_size=16))
def test_a_clock_that_jumps_leaves_a_node_with_one_lease_at_least(spans: list[tuple[int, int]]) -> None:
    answered = [Lease(issued, issued + took) for issued, took in spans]
    assert (groups_in_time(answered, timeout_ms=60_000) or 1) >= 1
