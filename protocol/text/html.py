"""HTML built by nested calls: everything but `Markup` is escaped, and only `el` and `join` build `Markup`.

    el("p", "Made by ", el("b", name), class_="soft")  →  <p class="soft">Made by <b>…</b></p>

- Attributes: `class_` is class, `aria_label` is aria-label; True writes the bare name, None and False omit it.
- Style and event handlers are never attributes: the Content-Security-Policy of every page forbids both.
"""

from collections.abc import Iterable
from html import escape
from typing import Any

_HTML_VOID = frozenset({"br", "img", "input", "link", "meta"})
_SVG_VOID = frozenset({"circle", "line", "path", "polyline", "rect"})
"""Elements without an end tag where they have no content; SVG elements close themselves."""


class Markup(str):
    """HTML that is already escaped."""

    __slots__ = ()


def el(tag: str, *children: Any, **attributes: Any) -> Markup:
    """Build the element `tag`; `children` may be text, markup or iterables of them."""
    start = f"{tag}{''.join(_attribute(name, value) for name, value in attributes.items())}"
    if tag in _HTML_VOID:
        return Markup(f"<{start}>")
    if tag in _SVG_VOID and not children:
        return Markup(f"<{start}/>")
    return Markup(f"<{start}>{join(*children)}</{tag}>")


def join(*children: Any) -> Markup:
    """Concatenate `children` without an element around them."""
    return Markup("".join(map(_child, children)))


def _child(child: Any) -> str:
    if isinstance(child, Markup):
        return child
    if child is None:
        return ""
    if isinstance(child, Iterable) and not isinstance(child, str):
        return join(*child)
    return escape(str(child), quote=False)


def _attribute(name: str, value: Any) -> str:
    name = name.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'
