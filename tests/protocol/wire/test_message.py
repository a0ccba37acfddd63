"""Typed messages: each means one thing in exactly one byte form, or is refused by name."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from protocol import limits
from protocol.breach import different
from protocol.errors import MalformedMessage, MessageTooLarge, NotCanonical, SwarmError
from protocol.wire import canonical
from protocol.wire.message import Message
from protocol.work.messages import Verdict


class Part(Message):
    """A nested message."""

    name: str
    weight: float


class Whole(Message):
    """A message with one field of every kind."""

    number: int
    flag: bool
    data: bytes
    parts: tuple[Part, ...] = Field(max_length=3)
    note: str | None


GOOD: dict[str, Any] = {
    "number": 1,
    "flag": True,
    "data": b"\0",
    "parts": [{"name": "a", "weight": 0.5}],
    "note": None,
}

wholes = st.builds(
    Whole,
    number=st.integers(-(2**63), 2**64 - 1),
    flag=st.booleans(),
    data=st.binary(max_size=50),
    parts=st.lists(
        st.builds(Part, name=st.text(max_size=5), weight=st.floats(allow_nan=False, allow_infinity=False)), max_size=3
    ).map(tuple),
    note=st.none() | st.text(max_size=5),
)


@given(wholes)
def test_every_message_survives_the_round_trip(message: Whole) -> None:
    assert Whole.from_bytes(message.to_bytes()) == message


@pytest.mark.parametrize(
    "change",
    [
        {"unknown": 1},
        {"number": "1"},
        {"number": 1.0},
        {"number": True},
        {"number": None},
        {"flag": 1},
        {"flag": "true"},
        {"data": "text"},
        {"parts": {}},
        {"parts": b""},
        {"parts": [["a", 0.5]]},
        {"parts": [{"name": "a"}]},
        {"parts": [{"name": "a", "weight": 0.5, "more": 1}]},
        {"parts": [{"name": b"a", "weight": 0.5}]},
        {"parts": [{"name": "a", "weight": True}]},
        {"parts": [{"name": "a", "weight": "0.5"}]},
        {"note": 0},
    ],
    ids=str,
)
def test_a_field_of_another_type_or_name_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage):
        Whole.from_bytes(canonical.encode(GOOD | change))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"parts": {}}, "Whole: parts: Input should be a list."),
        ({"parts": ["a"]}, "Whole: parts.0: Input should be a map."),
        ({"parts": [{"name": b"a", "weight": 0.5}]}, "Whole: parts.0.name: Input should be text."),
        ({"data": "text"}, "Whole: data: Input should be bytes."),
        ({"number": "1"}, "Whole: number: Input should be a valid integer."),
        ({"unknown": 1}, "Whole: unknown: There is no such field."),
        ({"parts": [GOOD["parts"][0]] * 4}, "Whole: parts: List should have at most 3 items, not 4."),
    ],
    ids=str,
)
def test_an_error_uses_the_words_of_the_protocol(change: dict[str, Any], said: str) -> None:
    """The reader may have written a client in another language, which has no tuples or dictionaries."""
    with pytest.raises(MalformedMessage) as refusal:
        Whole.from_bytes(canonical.encode(GOOD | change))
    assert str(refusal.value) == said
    assert refusal.value.breach is not None
    assert f"{refusal.value.breach.expected}." in said


def test_an_error_about_the_whole_message_names_it_once() -> None:
    with pytest.raises(MalformedMessage, match=r"^Whole: Input should be a map\.$"):
        Whole.from_bytes(canonical.encode(7))


@pytest.mark.parametrize("field", GOOD)
def test_a_missing_field_is_refused(field: str) -> None:
    with pytest.raises(MalformedMessage, match=field):
        Whole.from_bytes(canonical.encode({name: value for name, value in GOOD.items() if name != field}))


@pytest.mark.parametrize("value", [None, 0, "text", b"bytes", [], [GOOD]], ids=repr)
def test_a_message_that_is_no_map_is_refused(value: Any) -> None:
    with pytest.raises(MalformedMessage):
        Whole.from_bytes(canonical.encode(value))


def test_a_whole_number_is_no_second_form_of_a_fraction() -> None:
    """Else two byte strings with two hashes would be the same message."""
    assert Part.from_bytes(canonical.encode({"name": "a", "weight": 1.0})).weight == 1.0
    with pytest.raises(NotCanonical, match=r"^Part: weight: expected the fraction 1\.0, found the whole number 1\."):
        Part.from_bytes(canonical.encode({"name": "a", "weight": 1}))


def test_the_first_second_form_is_named_with_its_place() -> None:
    parts = [{"name": "a", "weight": 1.0}, {"name": "b", "weight": 2}]
    with pytest.raises(NotCanonical) as refusal:
        Whole.from_bytes(canonical.encode(GOOD | {"parts": parts}))
    assert refusal.value.breach == different("parts.1.weight", "the fraction 2.0", "the whole number 2")


def test_a_left_out_default_is_no_second_form_either() -> None:
    verdict = Verdict(lease_id="", outcome="rejected")
    assert Verdict.from_bytes(verdict.to_bytes()) == verdict
    with pytest.raises(NotCanonical, match=r"^Verdict: code: expected a value, found nothing") as refusal:
        Verdict.from_bytes(canonical.encode({"lease_id": "", "outcome": "rejected"}))
    assert refusal.value.breach == different("code", "a value", "nothing")


def test_a_message_is_refused_by_its_size_before_it_is_read() -> None:
    with pytest.raises(MessageTooLarge):
        Whole.from_bytes(b"\xc1" * (limits.MESSAGE_MAX_BYTES + 1))


def test_an_error_never_repeats_much_of_what_a_stranger_sent() -> None:
    """The text goes into replies and the store, and replies have limits themselves."""
    for name in ("n" * limits.STRING_MAX_BYTES, "\x1b[2J" * 100):
        with pytest.raises(MalformedMessage) as caught:
            Whole.from_bytes(canonical.encode(GOOD | {name: 1}))
        assert len(str(caught.value)) < 300
        canonical.decode(canonical.encode(caught.value.to_wire()))


def test_a_message_does_not_change() -> None:
    message = Part(name="a", weight=0.5)
    with pytest.raises(ValueError, match="frozen"):
        message.name = "b"  # type: ignore[misc]  # that it is refused is the point


@given(st.binary(max_size=200))
def test_garbage_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(SwarmError):
        Whole.from_bytes(data)
