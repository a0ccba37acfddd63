"""Python functions as tools: their JSON schemas for chat templates, and the check of a call's arguments.

- A schema comes from the annotations, and its descriptions from the docstring in Google's, NumPy's or Sphinx's form.
- Arguments are checked and converted by the annotations, as pydantic does: "3" is accepted for an int, and no text for
  a list. A parameter without an annotation accepts anything.
- `self` is left out, so that a method of an environment has the same schema before and after there is an instance.
"""

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema

from protocol.errors import ConfigInvalid

Tool = Callable[..., Any]
"""A function or a coroutine function that a policy may call."""

_FLAWS_SHOWN = 4


class BadArguments(Exception):
    """The arguments of a call do not fit the tool; the text is for the model."""


def schema_of(function: Tool) -> dict[str, Any]:
    """Return a tool as chat templates expect it: `{"type": "function", "function": {"name", …, "parameters"}}`."""
    summary, described = _docstring(inspect.getdoc(function) or "")
    properties = {}
    for name, adapter in _adapters(function).items():
        try:
            properties[name] = adapter.json_schema()
        except PydanticInvalidForJsonSchema as error:
            raise _unusable(function, f"its parameter {name} has no JSON schema: {error.message}") from None
        if name in described:
            properties[name]["description"] = described[name]
    required = [each.name for each in _parameters(function) if each.default is each.empty]
    parameters = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": name_of(function), "description": summary, "parameters": parameters},
    }


def name_of(function: Tool) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def arguments_for(function: Tool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with the types of the parameters; raise `BadArguments` if they do not fit."""
    adapters = _adapters(function)
    missing = [each.name for each in _parameters(function) if each.default is each.empty and each.name not in given]
    flaws = [f"{name} is missing" for name in missing]
    flaws += [f"there is no parameter {name[:64]!r}" for name in given if name not in adapters]
    made = {}
    for name, adapter in adapters.items():
        if name in given:
            try:
                made[name] = adapter.validate_python(given[name])
            except ValidationError as error:
                flaws += [f"{name}: {each['msg']}" for each in error.errors(include_url=False, include_context=False)]
    if flaws:
        raise BadArguments(f"Wrong arguments for {name_of(function)}: {'; '.join(flaws[:_FLAWS_SHOWN])}.")
    return made


@lru_cache(maxsize=256)
def _adapters(function: Tool) -> dict[str, TypeAdapter[Any]]:
    try:
        hints = typing.get_type_hints(inspect.unwrap(function), include_extras=True)
    except (NameError, TypeError) as error:
        raise _unusable(function, f"its annotations cannot be read: {error}") from None
    made: dict[str, TypeAdapter[Any]] = {}
    for each in _parameters(function):
        try:
            made[each.name] = TypeAdapter(hints.get(each.name, Any))
        except PydanticUserError as error:
            raise _unusable(
                function, f"its parameter {each.name} has a type that no JSON has: {error.message}"
            ) from None
    return made


def _parameters(function: Tool) -> list[inspect.Parameter]:
    try:
        every = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise _unusable(function, "it has no signature") from None
    named = [each for each in every if each.name != "self"]
    if unnamed := [each for each in named if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]:
        raise _unusable(function, f"its parameter {unnamed[0]} cannot be given by a name")
    return named


def _unusable(function: Tool, reason: str) -> ConfigInvalid:
    return ConfigInvalid(
        f"{name_of(function)} cannot be a tool: {reason}.",
        hint="A tool has named parameters of types that JSON has, such as int, str, list[str] or Literal.",
    )


_SECTION = re.compile(
    r"(args|arguments|parameters|params|returns|return|raises|yields|examples?|notes?|see also):?", re.I
)
_UNDERLINE = re.compile(r"\s*-{3,}\s*")
_GOOGLE = re.compile(r"(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_NUMPY = re.compile(r"(\w+)\s*(?::.*)?")
_FIELD = re.compile(r":\w[\w ]*:")
_SPHINX = re.compile(r":param\s+(?:[^:]*\s)?(\w+):\s*(.*)")


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description of a function, and those of its parameters."""
    lines = text.splitlines()
    end = next(
        (place for place, line in enumerate(lines) if _is_section(lines, place) or _SPHINX.match(line)), len(lines)
    )
    summary = " ".join(" ".join(lines[:end]).split())
    described: dict[str, list[str]] = {}
    within, current, style, indent = False, "", _GOOGLE, 0
    for place, line in enumerate(lines[end:], end):
        numpy = place + 1 < len(lines) and bool(_UNDERLINE.fullmatch(lines[place + 1]))
        if match := _SPHINX.match(line):
            within, current = False, match[1]
            described[current] = [match[2]]
        elif _FIELD.match(line):
            within, current = False, ""
        elif _is_section(lines, place):
            within, current = _is_parameters(line), ""
            style = _NUMPY if numpy else _GOOGLE
            indent = 0 if numpy else _indent_of(lines, place + 1)
        elif within and not _UNDERLINE.fullmatch(line) and line.strip() and _indent(line) == indent:
            match = style.fullmatch(line.strip())
            current = match[1] if match else ""
            described[current] = [match[2]] if match and style is _GOOGLE else []
        elif current and line.strip():
            described[current].append(line.strip())
        elif not line.strip() and not within:
            current = ""
    return summary, {name: " ".join(parts).strip() for name, parts in described.items() if name and any(parts)}


def _is_section(lines: list[str], place: int) -> bool:
    """Return True for `Args:`, and for `Parameters` above a line of dashes."""
    line = lines[place]
    underlined = place + 1 < len(lines) and _UNDERLINE.fullmatch(lines[place + 1]) is not None
    return bool(_SECTION.fullmatch(line.rstrip())) and (line.rstrip().endswith(":") or underlined)


def _is_parameters(line: str) -> bool:
    return line.strip().rstrip(":").lower() in ("args", "arguments", "parameters", "params")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _indent_of(lines: list[str], place: int) -> int:
    """Return the indentation of the first line with text from a place on."""
    return next((_indent(line) for line in lines[place:] if line.strip()), 0)
