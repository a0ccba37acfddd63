"""The error table: every failure has a code of its own that survives the wire."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ERRORS, LeaseClosed, SwarmError, named
from protocol.wire import canonical


def test_no_two_errors_share_a_code() -> None:
    def tree(base: type[SwarmError]) -> list[type[SwarmError]]:
        return [base, *(found for child in base.__subclasses__() for found in tree(child))]

    errors = [error for error in tree(SwarmError) if error.__module__ == "protocol.errors"]
    assert sorted(error.code for error in errors) == sorted(ERRORS)
    assert all(error.__doc__ and 400 <= error.http_status <= 599 for error in errors)


@pytest.mark.parametrize("kind", ERRORS.values(), ids=list(ERRORS))
def test_every_error_survives_the_wire(kind: type[SwarmError]) -> None:
    sent = kind("What happened.", hint="What to do.")
    got = SwarmError.from_wire(canonical.decode(canonical.encode(sent.to_wire())))
    assert type(got) is kind
    assert str(got) == "What happened. What to do."


@given(st.none() | st.integers() | st.text() | st.dictionaries(st.text(), st.integers() | st.text()))
def test_a_reply_that_is_no_error_becomes_one_that_can_be_read(value: object) -> None:
    assert str(SwarmError.from_wire(value))


def test_an_unknown_code_stays_readable() -> None:
    got = SwarmError.from_wire({"code": "from_the_future", "message": "m" * 9_999, "hint": ""})
    assert type(got) is SwarmError
    assert len(got.message) == 500
    assert LeaseClosed.code in ERRORS


def test_what_a_stranger_says_with_an_error_steers_no_terminal() -> None:
    error = SwarmError.from_wire({"code": "not_found", "message": "gone\x1b[2J\nswarm-node: all is well"})
    assert named(error) == r"gone\x1b[2J\nswarm-node: all is well [not_found]"
