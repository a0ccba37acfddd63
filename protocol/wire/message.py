"""The base of every typed message: strict, frozen, and with exactly one byte form.

- Unknown fields, missing fields and coerced types are rejected: a message has one meaning or none.
- `from_bytes` checks the size, then decodes, then checks the schema, then that the bytes are the canonical ones.
- It reads only a few more values than the fields of the message can hold, which bounds the cost of untrusted bytes.
"""

from collections.abc import Iterable
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from annotated_types import MaxLen
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from protocol import limits
from protocol.breach import different
from protocol.errors import MalformedMessage, NotCanonical
from protocol.wire import canonical


class Message(BaseModel):
    """A value with a schema and canonical bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def to_bytes(self) -> bytes:
        # The call inside `model_dump`, without its options.
        return canonical.encode(self.__pydantic_serializer__.to_python(self))

    @classmethod
    def from_bytes(cls, data: bytes, *, max_bytes: int = limits.MESSAGE_MAX_BYTES) -> Self:
        message = cls._validated(canonical.read(data, max_bytes=max_bytes, max_items=items_max(cls), tuples=True))
        # The schema lets 1 stand for 1.0 and a default for a missing field: other bytes for the same message.
        if message.to_bytes() != data:
            given = canonical.decode(data, max_bytes=max_bytes)  # raises if the encoding itself is wrong
            where, expected, observed = _first_difference(given, canonical.read(message.to_bytes()))
            said = f"{cls.__name__}: {where[:100]}: expected {expected}, found {observed}."
            raise NotCanonical(said, breach=different(where[-100:], expected, observed))
        return message

    @classmethod
    def from_value(cls, value: canonical.Value) -> Self:
        return cls._validated(_tuples(value))

    @classmethod
    def _validated(cls, value: canonical.Value) -> Self:
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where, wanted = ".".join(str(part) for part in first["loc"]), _expected(first)
            said = f"{cls.__name__}: {where[:100]}{': ' if where else ''}{wanted}."
            raise MalformedMessage(said, breach=different(where[-100:] or cls.__name__, wanted, _kind(first))) from None


@cache
def items_max(kind: type[Message]) -> int:
    """Return the most values in the bytes of a message; some are spare, so that an error can name an unknown field."""
    return min(_items(kind) + limits.SPARE_ITEMS, limits.MESSAGE_MAX_ITEMS)


def _items(annotation: Any, metadata: Iterable[Any] = ()) -> int:
    """Return the most values that a field of this type holds, itself included."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _items(parts[0], (*parts[1:], *metadata))
    if origin in (Union, UnionType):
        return max(map(_items, parts))
    if origin is Literal:
        return 1
    if isinstance(annotation, type) and issubclass(annotation, Message):
        fields = annotation.model_fields.values()
        return 1 + sum(1 + _items(field.annotation, field.metadata) for field in fields)
    if origin in (tuple, dict):
        bounds = [each for item in metadata for each in (item, *getattr(item, "metadata", ()))]
        longest = next((bound.max_length for bound in bounds if isinstance(bound, MaxLen)), limits.MESSAGE_MAX_ITEMS)
        return int(1 + longest * (_items(parts[0]) + (_items(parts[1]) if origin is dict else 0)))
    return 1


_EXPECTED = {
    "tuple_type": "Input should be a list",
    "model_type": "Input should be a map",
    "string_type": "Input should be text",
    "bytes_type": "Input should be bytes",
    "extra_forbidden": "There is no such field",
}
"""Faults by Pydantic's name, in the protocol's words: who reads them may have written a client in another language."""

_KINDS = {"tuple": "list", "dict": "map", "str": "text", "NoneType": "nil"}
"""The protocol's types by Python's."""


def _expected(fault: ErrorDetails) -> str:
    """Return what a field should be."""
    message = fault["msg"].replace("Tuple", "List").replace(" after validation", "")
    return _EXPECTED.get(fault["type"], message)


def _kind(fault: ErrorDetails) -> str:
    """Describe the faulty value, or say that it is missing; of a value that may be large, its type and length."""
    if fault["type"] == "missing":
        return "nothing"
    value = fault["input"]
    if isinstance(value, bool | int | float):
        return repr(value)
    kind = _KINDS.get(type(value).__name__, type(value).__name__)
    return f"{kind} of length {len(value)}" if hasattr(value, "__len__") else kind


def _first_difference(given: Any, meant: Any, where: str = "") -> tuple[str, str, str]:
    """Return the first field in which two forms of a message differ, with its expected and its observed value."""
    if isinstance(given, dict):
        for name in sorted(given.keys() | meant.keys()):
            field = f"{where}.{name}" if where else name
            if name not in given or name not in meant:
                return (field, "a value", "nothing") if name in meant else (field, "no such field", repr(given[name]))
            if (found := _first_difference(given[name], meant[name], field))[0]:
                return found
    elif isinstance(given, list):
        for place, (item, other) in enumerate(zip(given, meant, strict=True)):
            if (found := _first_difference(item, other, f"{where}.{place}"))[0]:
                return found
    elif type(given) is not type(meant):
        return where, f"the fraction {meant!r}", f"the whole number {given!r}"
    return "", "", ""


def _tuples(value: canonical.Value) -> canonical.Value:
    """Convert lists to tuples, the form that frozen models hold."""
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return value
