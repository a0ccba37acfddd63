"""Leases: every pair of state and event is either in the table or impossible; and the bytes of a temperature."""

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from protocol import limits
from protocol.errors import MalformedMessage, NotCanonical, SwarmError
from protocol.wire import canonical
from protocol.work.lease import OPEN, TRANSITIONS, Lease, LeaseEvent, LeaseState
from protocol.work.messages import LeaseReply

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


LEASE = Lease(
    lease_id="1" * 32, version=1, seed=7, samples=2, prompt=b"\5\0\0\0", price_micros_per_mtok=1, expires_ms=0
)


def test_a_lease_at_the_versions_temperature_has_the_bytes_that_it_had_before_there_were_others() -> None:
    assert LEASE.digest == "760c60a64307da403b1e960e82f05741fd7a967f0ce75f750b35a4909c4a08bc"
    assert not any(name in LEASE.to_bytes() for name in (b"temperature", b"report_every_ms"))


@pytest.mark.parametrize("temperature", [0.0, limits.TEMPERATURE_MIN, 0.7, limits.TEMPERATURE_MAX])
def test_a_temperature_goes_over_the_wire_and_into_the_digest(temperature: float) -> None:
    lease = LEASE.model_copy(update={"temperature": temperature})
    reply = LeaseReply(leases=(LEASE, lease), newest_version=1, reason="", retry_s=0.0, stays=False)
    assert LeaseReply.from_bytes(reply.to_bytes()).leases == (LEASE, lease)
    assert Lease.from_bytes(lease.to_bytes()).temperature == temperature
    assert lease.digest != LEASE.digest


@pytest.mark.parametrize(
    ("temperature", "error"),
    [
        (-1.0, MalformedMessage),
        (3.0, MalformedMessage),
        (1e-5, MalformedMessage),
        ("0.5", MalformedMessage),
        (True, MalformedMessage),
        (1, NotCanonical),
        (None, NotCanonical),  # a second form of the same lease
    ],
)
def test_other_temperatures_are_refused(temperature: Any, error: type[SwarmError]) -> None:
    value = LEASE.model_dump() | {"prefixes": [], "temperature": temperature}
    with pytest.raises(error, match="temperature: "):
        Lease.from_bytes(canonical.encode(value))


@pytest.mark.parametrize("temperature", [float("nan"), float("inf")])
def test_a_temperature_is_a_number(temperature: float) -> None:
    with pytest.raises(ValidationError):
        Lease.model_validate(LEASE.model_dump() | {"temperature": temperature})
