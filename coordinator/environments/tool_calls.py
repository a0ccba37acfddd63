"""Tool calls in the text of a turn, and the schemas of tools.

- A call is JSON between `<tool_call>` and `</tool_call>`: `{"name": "…", "arguments": {…}}`.
- A call that cannot be read is an error of the turn, which the environment shows to the policy.
"""

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_MARKED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


class ToolCall(NamedTuple):
    """A call: the name of the tool, and its arguments."""

    name: str
    arguments: Mapping[str, Any]


class Turn(NamedTuple):
    """A turn without its markers: the text, the calls, and an error for each call that cannot be read."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()


def parse(text: str, format: str = "auto") -> Turn:
    """Return the text and the calls of a turn."""
    calls, errors = list[ToolCall](), list[str]()
    for marked in _MARKED.findall(text):
        try:
            value = json.loads(marked)
            calls.append(ToolCall(str(value["name"]), dict(value.get("arguments") or {})))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            errors.append(f"The tool call cannot be read: {type(error).__name__}: {error}.")
    return Turn(_MARKED.sub("", text).strip(), tuple(calls), tuple(errors))


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a function, from its signature and its docstring."""
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    described = dict(re.findall(r"^\s+(\w+)(?: \([^)]*\))?: (.+)$", function.__doc__ or "", re.MULTILINE))
    properties = {
        each.name: _type_of(hints.get(each.name, str))
        | ({"description": described[each.name]} if each.name in described else {})
        for each in parameters
    }
    required = [each.name for each in parameters if each.default is inspect.Parameter.empty]
    schema = {"type": "object", "properties": properties, "required": required}
    summary = inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0]
    return {
        "type": "function",
        "function": {"name": function.__name__, "description": summary, "parameters": schema},
    }


def _type_of(hint: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _type_of(next(each for each in arguments if each is not type(None)))
    if origin is typing.Literal:
        return {"type": _TYPES[type(arguments[0])], "enum": list(arguments)}
    if origin is list and arguments:
        return {"type": "array", "items": _type_of(arguments[0])}
    return {"type": _TYPES.get(origin or hint, "string")}
