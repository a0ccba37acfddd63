"""The reference page of messages: the type and the bounds of each field, from the schemas that the messages check.

- Messages stand by their modules, in the order of the code. A type that is a message is a link.
- What only code checks, such as the numbers in packed bytes, is in docs/protocol.md and docs/ledger.md.
"""

import importlib
import re
from collections.abc import Iterator
from itertools import groupby
from math import log2
from pathlib import Path
from typing import Any

from protocol.wire.message import Message
from tests.tidy.repository import python_files

PATTERNS = {
    r"^12D3Koo[1-9A-HJ-NP-Za-km-z]{45}$": "node id",
    r"^[0-9A-Za-z.:\[\]-]{1,255}:[0-9]{1,5}$": "`host:port`",
    r"^([0-9a-f]{64})?$": "64 hex digits, or empty",
    r"^([0-9a-f]{32}){1,2}$": "32 or 64 hex digits",
    r"^([0-9a-f]{32}){0,2}$": "32 or 64 hex digits, or empty",
    "^({0}/{0}/{0})?$".format("[a-z0-9_.-]{1,20}"): "`engine/dtype/device`, each of 1 to 20 of `a-z0-9_.-`, or empty",
}
"""Patterns that have a name in docs/protocol.md."""

NAMES = {"string": "text", "number": "float", "null": "nil", "object": "map"}
"""Words of the protocol for types of a schema."""


def all_messages() -> list[type[Message]]:
    """Return every message of the protocol and the ledger that has a public name."""
    for path in python_files("protocol", "ledger"):
        importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
    return [
        model
        for model in _below(Message)
        if model.__module__.startswith(("protocol.", "ledger.")) and not model.__name__.startswith("_")
    ]


def _below(model: type[Message]) -> Iterator[type[Message]]:
    for child in model.__subclasses__():
        yield child
        yield from _below(child)


def sections() -> Iterator[tuple[Path, list[type[Message]]]]:
    """Yield each module that has messages, with these in the order of the code."""
    ordered = sorted(all_messages(), key=lambda model: model.__module__)
    for module, found in groupby(ordered, key=lambda model: model.__module__):
        names = list(vars(importlib.import_module(module)))
        yield Path(f"{module.replace('.', '/')}.py"), sorted(found, key=lambda model: names.index(model.__name__))


def rows(model: type[Message]) -> list[tuple[str, str]]:
    """Return each field of a message with its type and bounds."""
    schema = model.model_json_schema()
    return [(f"`{name}`", described(field)) for name, field in schema.get("properties", {}).items()]


def described(field: dict[str, Any]) -> str:
    """Return the type and the bounds that a schema requires, in words."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in field:
        return " or ".join(described(one) for one in field["anyOf"])
    if "const" in field or "enum" in field:
        return ", ".join(f'`"{one}"`' for one in field.get("enum", [field.get("const")]))
    kind = field.get("type", "")
    if kind == "array":
        return _list(field)
    if kind == "string" and field.get("format") == "binary":
        return f"bytes{_range(field, 'minLength', 'maxLength')}"
    if kind == "string" and (pattern := field.get("pattern", "")):
        digits = re.fullmatch(r"\^\[0-9a-f\]\{(\d+)\}\$", pattern)
        named = f"{digits[1]} hex digits" if digits else PATTERNS.get(pattern)
        form = "an http or https URL" if pattern.startswith("^https?://") else f"of the form `{pattern}`"
        return named or f"{_text(field)}, {form}"
    if kind == "string":
        return _text(field)
    if kind == "object" and isinstance(values := field.get("additionalProperties"), dict):
        return f"map of: {described(values)}"
    return f"{NAMES.get(kind, kind)}{_range(field, 'minimum', 'maximum')}{_outer(field)}"


def _text(field: dict[str, Any]) -> str:
    length = _range(field, "minLength", "maxLength")
    return f"text{length and f'{length} characters'}"


def _list(field: dict[str, Any]) -> str:
    """Return the words for a list, or for a tuple of fixed types."""
    bounds = _range(field, "minItems", "maxItems")
    if "prefixItems" in field:
        return f"list of {' and '.join(described(one) for one in field['prefixItems'])}"
    return f"list{bounds}, of: {described(field.get('items', {}))}"


def _range(field: dict[str, Any], least: str, most: str) -> str:
    low, high = field.get(least), field.get(most)
    if low is not None and high is not None:
        return f", {_number(low)}" if low == high else f", {_number(low)} to {_number(high)}"
    if high is not None:
        return f", at most {_number(high)}"
    return "" if low is None else f", at least {_number(low)}"


def _outer(field: dict[str, Any]) -> str:
    """Return the bounds that are not themselves allowed."""
    said = [(field.get("exclusiveMinimum"), "above"), (field.get("exclusiveMaximum"), "below")]
    return "".join(f", {word} {_number(bound)}" for bound, word in said if bound is not None)


def _number(value: float) -> str:
    """Return a number as people write it: large powers of two as powers."""
    if value >= 2**32 and log2(value).is_integer():
        return f"2^{int(log2(value))}"
    return f"{value:,}" if isinstance(value, int) or not float(value).is_integer() else f"{int(value):,}"
