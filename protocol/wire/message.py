"""The base of every typed message: strict, frozen, and with exactly one byte form.

- Unknown fields, missing fields and coerced types are refused: a message means one thing or nothing.
- `from_bytes` checks size, then whether it can be read, then the schema, then whether the bytes are the message's own.
- It reads no more values than the fields of the message can hold, and a few: a stranger's bytes cost no more than that.
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
        # What `model_dump` calls, without the options that it has for others.
        return canonical.encode(self.__pydantic_serializer__.to_python(self))

    @classmethod
    def from_bytes(cls, data: bytes, *, max_bytes: int = limits.MESSAGE_MAX_BYTES) -> Self:
        message = cls._validated(canonical.read(data, max_bytes=max_bytes, max_items=items_max(cls), tuples=True))
        # The schema lets 1 stand for 1.0 and a default for a missing field: other bytes for the same message.
        if message.to_bytes() != data:
            canonical.decode(data, max_bytes=max_bytes)  # says so if already the encoding is wrong
            raise NotCanonical(f"{cls.__name__}: a field is missing, or is a whole number where a fraction stands.")
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
            where = ".".join(str(part) for part in first["loc"]) or cls.__name__
            said = f"{cls.__name__}: {where[:100]}: {first['msg']}."
            raise MalformedMessage(said, breach=different(where[-100:], first["msg"], _kind(first))) from None


@cache
def items_max(kind: type[Message]) -> int:
    """Return how many values the bytes of a message may have; some are spare, so that unknown fields are named."""
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


def _kind(fault: ErrorDetails) -> str:
    """What stands there, or that nothing does; of a value that may be large, its kind and length."""
    if fault["type"] == "missing":
        return "nothing"
    value = fault["input"]
    if isinstance(value, bool | int | float):
        return repr(value)
    return f"{type(value).__name__} of length {len(value)}" if hasattr(value, "__len__") else type(value).__name__


def _tuples(value: canonical.Value) -> canonical.Value:
    """Lists as tuples, the form that frozen models hold."""
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return value
