"""The canonical encoding: one value, one byte form; hostile bytes are named errors that cost no memory.

- What decodes, encodes to the very same bytes; whatever else MessagePack would read is refused.
- Limits are applied to announced sizes, so bombs are refused by their headers.
"""

import math
import struct
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol import limits
from protocol.errors import MalformedMessage, MessageTooLarge, NonFiniteNumber, NotCanonical, SwarmError
from protocol.wire import canonical

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=50),
    st.binary(max_size=300),
)
values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=10), inner, max_size=20),
    max_leaves=30,
).filter(lambda value: depth(value) <= limits.MESSAGE_MAX_DEPTH)


def depth(value: Any) -> int:
    """Return how many containers stand around the innermost value."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max((1 + depth(item) for item in inner), default=0)


def same(left: Any, right: Any) -> bool:
    """Equal in value and type: 1, 1.0 and True are three values here."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and repr(left) == repr(right)


@given(values)
def test_every_value_survives_the_round_trip(value: Any) -> None:
    assert same(canonical.decode(canonical.encode(value)), value)


@given(st.dictionaries(st.text(max_size=4), st.integers(), max_size=8), st.randoms(use_true_random=False))
def test_the_order_in_which_a_map_was_filled_leaves_no_trace(value: dict[str, int], chance: Any) -> None:
    value = {key: number % 2**63 for key, number in value.items()}
    shuffled = list(value.items())
    chance.shuffle(shuffled)
    assert canonical.encode(dict(shuffled)) == canonical.encode(value)


@pytest.mark.parametrize(
    ("value", "golden"),
    [
        (None, "c0"),
        (True, "c3"),
        (0, "00"),
        (127, "7f"),  # the last fixint
        (128, "cc80"),
        (255, "ccff"),
        (256, "cd0100"),
        (2**16, "ce00010000"),
        (2**32, "cf0000000100000000"),
        (2**64 - 1, "cfffffffffffffffff"),
        (-32, "e0"),  # the last negative fixint
        (-33, "d0df"),
        (-129, "d1ff7f"),
        (-(2**63), "d38000000000000000"),
        (1.5, "cb3ff8000000000000"),
        (-0.0, "cb8000000000000000"),
        ("", "a0"),
        ("é", "a2c3a9"),
        (b"", "c400"),
        (bytes(256), "c50100" + "00" * 256),
        ([1, [2]], "92019102"),
        ({"b": 1, "a": {"é": b"x"}}, "82a16181a2c3a9c40178a16201"),
        ({"\U00010000": 1, "\uffff": 2}, "82a3efbfbf02a4f090808001"),  # UTF-16 would sort these the other way
    ],
)
def test_golden_vectors(value: Any, golden: str) -> None:
    assert canonical.encode(value).hex() == golden
    assert same(canonical.decode(bytes.fromhex(golden)), value)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", MalformedMessage),
        (b"\xcc\x7f", NotCanonical),  # 127 in two bytes
        (b"\xcd\x00\xff", NotCanonical),
        (b"\xce\x00\x00\xff\xff", NotCanonical),
        (b"\xcf" + bytes(7) + b"\x01", NotCanonical),
        (b"\xd0\x01", NotCanonical),  # a positive number in a signed form
        (b"\xd0\xe0", NotCanonical),  # -32 in two bytes
        (b"\xd3" + b"\xff" * 8, NotCanonical),
        (b"\xca\x3f\xc0\x00\x00", NotCanonical),  # float32
        (b"\xd9\x01a", NotCanonical),  # lengths longer than they need be
        (b"\xda\x00\x01a", NotCanonical),
        (b"\xdb\x00\x00\x00\x01a", NotCanonical),
        (b"\xc5\x00\x01a", NotCanonical),
        (b"\xc6\x00\x00\x00\x01a", NotCanonical),
        (b"\xdc\x00\x01\x01", NotCanonical),
        (b"\xdd\x00\x00\x00\x01\x01", NotCanonical),
        (b"\xde\x00\x01\xa1a\x01", NotCanonical),
        (b"\xdf\x00\x00\x00\x01\xa1a\x01", NotCanonical),
        (b"\x82\xa1b\x01\xa1a\x02", NotCanonical),  # unsorted keys
        (b"\x82\xa1a\x01\xa1a\x01", NotCanonical),  # the same key twice
        (b"\x82\xa1a\x01\xa1a\x02", NotCanonical),
        (b"\x81\x01\x01", MalformedMessage),  # a key that is no text
        (b"\x81\xc4\x01a\x01", MalformedMessage),
        (b"\x81\x90\x01", MalformedMessage),
        (b"\xc1", NotCanonical),  # never used by MessagePack
        (b"\xd4\x00\x00", NotCanonical),  # extension types
        (b"\xd6\xff\x00\x00\x00\x00", NotCanonical),  # a timestamp
        (b"\xc7\x00\x05", NotCanonical),
        (b"\xc9\x00\x00\x00\x00\x05", NotCanonical),
        (b"\xa1\xff", MalformedMessage),  # not UTF-8
        (b"\xa2\xc0\x80", MalformedMessage),  # overlong UTF-8
        (b"\xa3\xed\xa0\x80", MalformedMessage),  # a lone surrogate
        (b"\x81\xa1\xff\x01", MalformedMessage),
        (b"\x01\x01", MalformedMessage),  # something follows
        (b"\x90\x00", MalformedMessage),
        (b"\x91", MalformedMessage),  # something is missing
        (b"\xcd\x01", MalformedMessage),
        (b"\xda\x01", MalformedMessage),
        (b"\xa2a", MalformedMessage),
        (b"\xc4\x02a", MalformedMessage),
        (b"\xcb" + struct.pack(">d", math.nan), NonFiniteNumber),
        (b"\xcb" + struct.pack(">d", math.inf), NonFiniteNumber),
        (b"\x81\xa1a\x91\xcb" + struct.pack(">d", -math.inf), NonFiniteNumber),
    ],
    ids=lambda item: item.hex() if isinstance(item, bytes) else item.code,
)
def test_every_other_form_of_a_value_is_refused(data: bytes, error: type[SwarmError]) -> None:
    with pytest.raises(SwarmError) as caught:
        canonical.decode(data)
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (math.nan, NonFiniteNumber),
        ([math.inf], NonFiniteNumber),
        (2**64, MalformedMessage),
        (-(2**63) - 1, MalformedMessage),
        ({1: 2}, MalformedMessage),
        ({"a", "b"}, MalformedMessage),
        (object(), MalformedMessage),
        (bytearray(b"a"), MalformedMessage),
        ("\ud800", MalformedMessage),
        ({"\udfff": 1}, MalformedMessage),
    ],
)
def test_what_has_no_canonical_form_is_never_sent(value: Any, error: type[SwarmError]) -> None:
    with pytest.raises(SwarmError) as caught:
        canonical.encode(value)
    assert type(caught.value) is error


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x91" * 5_000 + b"\x01", id="lists in lists"),
        pytest.param(b"\x81\xa0" * 5_000 + b"\x01", id="maps in maps"),
        pytest.param(b"\xdc\x00\x01" * 100_000 + b"\x01", id="long headers"),
        pytest.param(b"\xdd" + (10**9).to_bytes(4), id="a list of 10^9 values and none of them there"),
        pytest.param(b"\xdd\xff\xff\xff\xff" + bytes(1000), id="a list of 2^32 values"),
        pytest.param(b"\xdf\xff\xff\xff\xff" + bytes(1000), id="a map of 2^32 values"),
        pytest.param((b"\xdd" + (1000).to_bytes(4)) * 3 + bytes(3000), id="lists that promise each other's values"),
        pytest.param(b"\xc6\xff\xff\xff\xff", id="4 GiB of bytes"),
        pytest.param(b"\xdb\xff\xff\xff\xff", id="4 GiB of text"),
    ],
)
def test_a_bomb_is_refused_by_its_header(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises((MessageTooLarge, MalformedMessage)):
            canonical.decode(data)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def nested(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


LAST, FIRST_TOO_MANY = 0, 1


@pytest.mark.parametrize("over", [LAST, FIRST_TOO_MANY])
@pytest.mark.parametrize(
    "at_limit",
    [
        pytest.param(lambda over: nested(limits.MESSAGE_MAX_DEPTH + over), id="depth"),
        pytest.param(lambda over: [0] * (limits.MESSAGE_MAX_ITEMS - 1 + over), id="items"),
        pytest.param(lambda over: "a" * (limits.STRING_MAX_BYTES + over), id="text"),
        pytest.param(lambda over: {"k" * (limits.STRING_MAX_BYTES + over): 1}, id="key"),
        pytest.param(lambda over: bytes(limits.MESSAGE_MAX_BYTES - 5 + over), id="size"),
    ],
)
def test_a_limit_is_reached_but_never_passed(at_limit: Any, over: int) -> None:
    value = at_limit(over)
    data = msgpack.packb(value)
    if over:
        with pytest.raises(MessageTooLarge):
            canonical.decode(data)
    else:
        assert canonical.decode(data) == value


def test_a_reader_with_less_room_refuses_sooner() -> None:
    data = canonical.encode([1, 2, 3])
    assert canonical.decode(data, max_bytes=len(data)) == [1, 2, 3]
    with pytest.raises(MessageTooLarge):
        canonical.decode(data, max_bytes=len(data) - 1)


def test_a_value_that_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(MessageTooLarge):
        canonical.encode(endless)


def never_fails_without_a_name(data: bytes) -> None:
    """Bytes are refused by name, or are the one form of what they mean."""
    try:
        value = canonical.decode(data)
    except SwarmError:
        return
    assert canonical.encode(value) == data


@given(st.binary(max_size=200))
@example(b"\x81\xa1\x00\xc1")
@example(b"\xc7\xff")
@example(b"\xdc\xff\xff" + bytes(65_534))
def test_random_bytes_are_refused_by_name_or_canonical(data: bytes) -> None:
    never_fails_without_a_name(data)


@given(values, st.data())
def test_damaged_messages_are_refused_by_name_or_canonical(value: Any, data: st.DataObject) -> None:
    original = bytearray(canonical.encode(value))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(original)))
        original[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    never_fails_without_a_name(bytes(original))


@pytest.mark.parametrize("leaf", [1, "x", None])
def test_scalars_in_the_deepest_container_that_may_be_encoded_can_be_read_again(leaf: object) -> None:
    deepest: object = leaf
    for _ in range(limits.MESSAGE_MAX_DEPTH):
        deepest = [deepest]
    assert canonical.decode(canonical.encode(deepest)) == deepest
    with pytest.raises(MessageTooLarge):
        canonical.encode([deepest])
