"""Places of callers: what costs a stranger one address is one place, however a socket tells it."""

import pytest

from protocol.people.addresses import neighbourhood


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2001:db8::1", "2001:db8::ffff:0:1:2"),
        ("fe80::1%eth0", "fe80::2%eth0"),
        ("192.0.2.7", "::ffff:192.0.2.7"),  # as a socket for both families has it
    ],
)
def test_one_place(one: str, other: str) -> None:
    assert neighbourhood(one) == neighbourhood(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2001:db8::1", "2001:db8:0:1::1"),
        ("192.0.2.7", "192.0.2.8"),
        ("::ffff:192.0.2.7", "::ffff:192.0.2.8"),
        ("", "192.0.2.7"),  # the caller was gone before anybody asked
    ],
)
def test_two_places(one: str, other: str) -> None:
    assert neighbourhood(one) != neighbourhood(other)
