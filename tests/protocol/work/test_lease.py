"""The states of a lease: every pair of state and event is either in the table or impossible."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.work.lease import OPEN, TRANSITIONS, LeaseEvent, LeaseState

ENDS = set(LeaseState) - set(OPEN)
WORDS = {LeaseEvent.HOLD, LeaseEvent.BEGIN}
"""Events that a node reports of a lease while it is open."""


@pytest.mark.parametrize(("state", "event"), list(product(LeaseState, sorted(set(LeaseEvent) - WORDS))))
def test_an_open_lease_may_end_in_any_way_and_an_ended_one_never_again(state: LeaseState, event: LeaseEvent) -> None:
    assert ((state, event) in TRANSITIONS) == (state in OPEN)
    assert TRANSITIONS.get((state, event)) in {None, *ENDS}


def test_every_end_is_reached_by_an_event_of_its_own() -> None:
    for state in OPEN:
        assert {TRANSITIONS[state, event] for event in set(LeaseEvent) - WORDS} == ENDS


@pytest.mark.parametrize(("state", "event"), list(product(LeaseState, sorted(WORDS))))
def test_what_a_node_says_only_ever_brings_a_lease_forward(state: LeaseState, event: LeaseEvent) -> None:
    after = TRANSITIONS.get((state, event))
    assert after is None or OPEN.index(after) > OPEN.index(state)


@given(st.lists(st.sampled_from(LeaseEvent)))
def test_whatever_happens_a_lease_ends_once(events: list[LeaseEvent]) -> None:
    state, ends = LeaseState.OFFERED, 0
    for event in events:
        after = TRANSITIONS.get((state, event), state)
        ends += after != state and after in ENDS
        state = after
    assert ends == (state in ENDS) <= 1
