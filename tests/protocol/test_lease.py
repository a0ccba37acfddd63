"""The states of a lease: every pair of state and event is either in the table or impossible."""

from itertools import product

import pytest

from protocol.lease import TRANSITIONS, Event, State

ENDS = set(State) - {State.OPEN}


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_an_open_lease_ends_once_and_an_ended_one_never_again(state: State, event: Event) -> None:
    assert ((state, event) in TRANSITIONS) == (state is State.OPEN)


def test_every_end_is_reached_by_an_event_of_its_own() -> None:
    assert sorted(TRANSITIONS.values()) == sorted(ENDS)
