"""Places of callers: what costs a stranger one address is one place, however a socket tells it."""

import pytest

from protocol.people.addresses import is_public_host, neighbourhood


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2001:db8::1", "2001:db8::ffff:0:1:2"),
        ("2001:db8::1", "2001:db8:0:ff::1"),  # a home has many networks
        ("fe80::1%eth0", "fe80::2%eth0"),
        ("192.0.2.7", "::ffff:192.0.2.7"),  # as a socket for both families has it
    ],
)
def test_one_place(one: str, other: str) -> None:
    assert neighbourhood(one) == neighbourhood(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2001:db8::1", "2001:db8:0:100::1"),
        ("192.0.2.7", "192.0.2.8"),
        ("::ffff:192.0.2.7", "::ffff:192.0.2.8"),
        ("", "192.0.2.7"),  # the caller was gone before anybody asked
    ],
)
def test_two_places(one: str, other: str) -> None:
    assert neighbourhood(one) != neighbourhood(other)


@pytest.mark.parametrize(
    "host",
    [
        "swarm.example.org", "swarm.example.org.", "4.example.org", "93.184.215.14", "93.184.215.14.",
        "2606:2800:21f::1", "64:ff9b::5db8:d70e", "2002:5db8:d70e::1",
    ],
)  # fmt: skip
def test_a_public_host(host: str) -> None:
    assert is_public_host(host)


@pytest.mark.parametrize(
    "host",
    [
        "", "localhost", "nas", "nas.local", "NAS.Local.", "rig.home.arpa", "127.0.0.1", "0.0.0.0", "10.1.2.3", "::",
        "192.168.1.2", "172.16.0.1", "100.64.0.1", "169.254.1.1", "::1", "fe80::1%eth0", "fd00::1", "::ffff:10.0.0.1",
        "127.0.0.1.", "10.0.0.1.", "127.1", "192.168.257", "0177.0.0.1", "0x7f.1", "2130706433", "64:ff9b::10.0.0.1",
        "64:ff9b::a00:1", "2002:a00:1::1", "::10.0.0.1", "224.0.0.1", "ff02::1", "localhost.", "a.localhost.",
        "nas.fritz.box", "rig.test",
    ],
)  # fmt: skip
def test_a_host_of_one_network(host: str) -> None:
    assert not is_public_host(host)
