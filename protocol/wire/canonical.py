"""The one deterministic MessagePack encoding: equal values have equal bytes, so bytes can be hashed and signed.

Rules:

- Values are None, bool, 64-bit int, finite float (always 64 bits), str, bytes, list, and dict with str keys.
- Map keys are sorted by their UTF-8 bytes, every length and number takes its shortest form, nothing follows the value.
- Decoding walks the headers first and applies size, depth, count and string limits before any object is built;
  then it encodes the result again and requires identical bytes.
"""

import math
from typing import Any

import msgpack

from protocol import limits
from protocol.breach import different
from protocol.errors import MalformedMessage, MessageTooLarge, NonFiniteNumber, NotCanonical

Value = Any
"""Any value the rules above allow."""

_PLAIN = frozenset({type(None), bool, int, str, bytes})
"""Types that are encoded as they are; the packer checks whether an integer fits."""

_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
"""Header byte → payload bytes of nil, booleans, float64 and integers."""

_COUNTED = {
    0xC4: ("bytes", 1), 0xC5: ("bytes", 2), 0xC6: ("bytes", 4),
    0xD9: ("str", 1), 0xDA: ("str", 2), 0xDB: ("str", 4),
    0xDC: ("list", 2), 0xDD: ("list", 4), 0xDE: ("map", 2), 0xDF: ("map", 4),
}  # fmt: skip
"""Header byte → the type it announces, and the bytes of its length field."""


def _step(first: int) -> tuple[int, int] | None:
    """Return the size of a value with this header byte and its number of children; None if more must be read."""
    if first <= 0x7F or first >= 0xE0:
        return 1, 0
    if first <= 0x8F:
        return 1, 2 * (first & 0x0F)
    if first <= 0x9F:
        return 1, first & 0x0F
    if first <= 0xBF:
        return 1 + (first & 0x1F), 0
    return (1 + _FIXED[first], 0) if first in _FIXED else None


_STEPS = [_step(first) for first in range(256)]
"""A table, because most headers are one byte and every message of every node is walked."""


def encode(value: Value) -> bytes:
    """Return the canonical bytes of a value."""
    try:
        packed = msgpack.packb(_ordered(value, 0), use_bin_type=True)
    except UnicodeEncodeError as error:
        raise MalformedMessage("A string has no UTF-8 form.") from error
    except OverflowError as error:
        raise MalformedMessage("An integer does not fit into 64 bits.") from error
    assert isinstance(packed, bytes)
    return packed


def decode(
    data: bytes, *, max_bytes: int = limits.MESSAGE_MAX_BYTES, max_items: int = limits.MESSAGE_MAX_ITEMS
) -> Value:
    """Return the value of canonical bytes; other bytes raise a named error before they use memory."""
    value = read(data, max_bytes=max_bytes, max_items=max_items)
    if encode(value) != data:
        raise NotCanonical("The message is not in its canonical encoding.", hint="Sort map keys, use shortest forms.")
    return value


def read(
    data: bytes,
    *,
    max_bytes: int = limits.MESSAGE_MAX_BYTES,
    max_items: int = limits.MESSAGE_MAX_ITEMS,
    tuples: bool = False,
) -> Value:
    """Return the value of bytes that keep all limits, with tuples in place of lists if `tuples` is set.

    The caller checks that the bytes are canonical.
    """
    if len(data) > max_bytes:
        raise MessageTooLarge(
            f"The message has {len(data)} bytes; at most {max_bytes} are read here.",
            breach=different("message", f"at most {max_bytes} bytes", f"{len(data)} bytes"),
        )
    end = _measure(data, max_items)
    if end != len(data):
        raise MalformedMessage(f"{len(data) - end} bytes follow the end of the message.")
    try:
        value = msgpack.unpackb(data, raw=False, strict_map_key=True, use_list=not tuples)
    except (ValueError, UnicodeDecodeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"The message is not MessagePack: {error}.") from error
    return value


def _ordered(value: Value, depth: int) -> Value:
    """Return the value with sorted maps; reject types that the encoding does not have."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise NonFiniteNumber(f"{value} is not a finite number.")
        return value
    if value and depth >= limits.MESSAGE_MAX_DEPTH and isinstance(value, list | tuple | dict):
        raise MessageTooLarge(f"The message nests deeper than {limits.MESSAGE_MAX_DEPTH} levels.")
    if isinstance(value, list | tuple):
        return [item if type(item) in _PLAIN else _ordered(item, depth + 1) for item in value]
    if isinstance(value, dict):
        if {*map(type, value)} != {str} and not all(isinstance(key, str) for key in value):
            raise MalformedMessage("A map key is not a string.")
        # UTF-8 keeps code point order, so sorting the strings sorts their bytes.
        if _PLAIN.issuperset(map(type, value.values())):
            return dict(sorted(value.items()))  # no two keys are equal, so no values are compared
        return {key: item if type(item := value[key]) in _PLAIN else _ordered(item, depth + 1) for key in sorted(value)}
    if isinstance(value, int | str | bytes):  # a subclass, such as a member of an enum
        return value
    raise MalformedMessage(f"A {type(value).__name__} has no canonical encoding.")


def _measure(data: bytes, max_items: int) -> int:
    """Return the end of the first value by reading headers only, and apply every limit on the way."""
    position, items = 0, 0
    remaining = [1]  # values still to come, per open container
    while remaining:
        if remaining[-1] == 0:
            remaining.pop()
            continue
        remaining[-1] -= 1
        items += 1
        if items > max_items:
            raise MessageTooLarge(f"The message has more than {max_items} values.")
        step = _STEPS[data[position]] if position < len(data) else None
        if step is None:
            position, children = _counted(data, position)
        else:
            position, children = position + step[0], step[1]
        if position > len(data) or children > len(data) - position:
            raise MalformedMessage("The message ends in the middle of a value.")
        if children:
            remaining.append(children)
            if len(remaining) > limits.MESSAGE_MAX_DEPTH + 1:
                raise MessageTooLarge(f"The message nests deeper than {limits.MESSAGE_MAX_DEPTH} levels.")
    return position


def _counted(data: bytes, position: int) -> tuple[int, int]:
    """Read a header with a length; return the end of its value and its number of children."""
    if position >= len(data):
        raise MalformedMessage("The message ends in the middle of a value.")
    first, position = data[position], position + 1
    if first not in _COUNTED:
        raise NotCanonical(f"MessagePack type 0x{first:02x} is not part of this protocol.")
    kind, width = _COUNTED[first]
    if position + width > len(data):
        raise MalformedMessage("The message ends in the middle of a length.")
    count = int.from_bytes(data[position : position + width])
    position += width
    if kind == "str" and count > limits.STRING_MAX_BYTES:
        raise MessageTooLarge(f"A string has {count} bytes; at most {limits.STRING_MAX_BYTES} are read.")
    if kind in ("str", "bytes"):
        return position + count, 0
    return position, count if kind == "list" else 2 * count
