"""What a node's own word on its address is worth: others must be able to dial it."""

import pytest

from coordinator.people.dialable import dialable

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
