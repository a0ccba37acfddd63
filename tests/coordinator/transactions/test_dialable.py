"""Dialable nodes: a node's reported address counts only if others can dial it."""

import pytest

from coordinator.transactions.registry import dialable
from protocol.errors import MalformedMessage

ELSEWHERE = "203.0.113.7"


@pytest.mark.parametrize(
    ("said", "caller", "tried"),
    [
        ("0.0.0.0:8701", ELSEWHERE, [f"{ELSEWHERE}:8701"]),  # what `--help` and the doctor tell an owner to say
        ("0.0.0.0:8701", f"::ffff:{ELSEWHERE}", [f"{ELSEWHERE}:8701"]),
        ("[::]:8701", "2001:db8::7", ["[2001:db8::7]:8701"]),
        ("[::]:8701", "", []),  # behind a proxy: nobody knows
        ("0.0.0.0:8701", "127.0.0.1", ["127.0.0.1:8701"]),
        ("127.0.0.1:4001", ELSEWHERE, []),  # the default of a node that is not where the coordinator is
        ("127.0.0.1:4001", "127.0.0.1", ["127.0.0.1:4001"]),
        ("127.0.0.1:4001", "", ["127.0.0.1:4001"]),
        ("198.51.100.9:8701", ELSEWHERE, ["198.51.100.9:8701"]),  # another network card, or a forwarded port
        ("gpu.example.org:8701", ELSEWHERE, ["gpu.example.org:8701"]),
    ],
)
def test_others_are_told_what_they_can_dial(said: str, caller: str, tried: list[str]) -> None:
    assert dialable([said], caller) == tried


def test_two_words_for_one_address_are_one() -> None:
    assert dialable(["0.0.0.0:1", f"{ELSEWHERE}:1", "127.0.0.1:1"], ELSEWHERE) == [f"{ELSEWHERE}:1"]


NEVER = [
    *("203.0.113.9:0", "203.0.113.9:65536", "203.0.113.9:99999", "gpu.example.org:0"),
    *("224.0.0.1:4001", "239.255.255.250:1900", "[ff02::1]:4001", "[::ffff:224.0.0.1]:4001"),
    *("255.255.255.255:4001", "240.0.0.1:4001", "0.1.2.3:4001"),
    *("[fe80::1]:4001", "[::1:4001", "::1:4001", "[gpu.example.org]:4001"),
    *("2130706433:4001", "127.1:4001", "0x7f000001:4001", "1.2.3:4001", "-.example.org:4001", "a..b:4001", "...:4001"),
]
"""Ports 0 and above 65535, groups, broadcasts, links without a zone, and numbers that resolvers take for addresses."""


@pytest.mark.parametrize("caller", ["", ELSEWHERE, "127.0.0.1"])
@pytest.mark.parametrize("said", NEVER)
def test_an_address_that_nobody_can_dial_is_rejected(said: str, caller: str) -> None:
    with pytest.raises(MalformedMessage, match="cannot be dialled"):
        dialable([f"{ELSEWHERE}:4001", said], caller)


@pytest.mark.parametrize(
    ("said", "caller", "tried"),
    [
        ("localhost:4001", ELSEWHERE, []),  # would be whoever dials
        ("node.localhost:4001", "8.8.4.4", []),
        ("localhost:4001", "127.0.0.1", ["localhost:4001"]),
        ("[::1]:4001", "::1", ["[::1]:4001"]),
        ("[64:ff9b::808:808]:4001", "8.8.4.4", ["[64:ff9b::808:808]:4001"]),
        ("10.0.0.5:4001", "8.8.4.4", []),  # of a network that others are not in
        ("[fd00::5]:4001", "2001:4860::7", []),
        ("10.0.0.5:4001", "10.0.0.9", ["10.0.0.5:4001"]),
        ("10.0.0.5:4001", "127.0.0.1", ["10.0.0.5:4001"]),
        ("10.0.0.5:4001", "", ["10.0.0.5:4001"]),
        ("100.64.3.2:4001", "8.8.4.4", []),  # behind the NAT of a provider
        ("100.64.3.2:4001", "100.64.3.9", ["100.64.3.2:4001"]),
        ("8.8.8.8:4001", "8.8.4.4", ["8.8.8.8:4001"]),
        ("0.0.0.0:4001", "0.0.0.0", []),  # unspecified after the caller's address stands in its place
        ("0.0.0.0:4001", "224.0.0.1", []),
    ],
)
def test_an_address_of_a_network_that_others_are_not_in_is_left_out(said: str, caller: str, tried: list[str]) -> None:
    assert dialable([said], caller) == tried
