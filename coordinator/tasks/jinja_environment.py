"""The environment of chat templates, as transformers 5.23 defines it, in jinja's sandbox.

- Loop controls, `{% generation %}`, `tojson` without HTML escapes, `raise_exception`, `strftime_now`, and restricted
  forms of `dict` and `namespace`.
- The date is fixed: a prompt must not change while a round runs.
- A module of its own, since jinja2 is optional: nothing is imported before a policy's template is read.
"""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

DATE = datetime(2026, 1, 1, tzinfo=UTC)
"""The current date that templates see."""


def compiled(template: str) -> Template:
    """Compile a template of unknown origin."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.from_string(template)


def strftime_now(format_: str) -> str:
    """Return the fixed date in a format."""
    return DATE.strftime(format_)


class _Generation(Extension):
    """The tag `{% generation %}`, which marks a model's text for trainers; it changes no text."""

    tags = {"generation"}  # noqa: RUF012  # jinja declares it like this

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` without the attributes of the class."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` without private names, which would give access to Python's own objects."""

    def __init__(
        *args: Any, **values: Any
    ) -> None:  # self is not a named parameter, as a template may use that name for a value
        self, *given = args
        attributes = dict(*given, **values)
        for name in attributes:
            _require_public(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot store {name!r}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without HTML escapes, which jinja's own filter adds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)
