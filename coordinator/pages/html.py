"""HTML as nested calls: whatever is no `Markup` is escaped, and only `el` makes `Markup`.

    el("p", "Made by ", el("b", name), class_="soft")  →  <p class="soft">Made by <b>…</b></p>

- Attributes: `class_` is class, `aria_label` is aria-label; True stands alone, None and False leave it out.
- No style and no handler is ever an attribute: the pages' policy forbids both.
"""

from collections.abc import Iterable
from html import escape
from typing import Any

_HTML_VOID = frozenset({"br", "input", "link", "meta"})
_SVG_VOID = frozenset({"circle", "line", "path", "polyline", "rect"})
"""Elements that are written without an end where they have no content; those of SVG close themselves."""


class Markup(str):
    """HTML that may be sent as it stands."""

    __slots__ = ()


def el(tag: str, *children: Any, **attributes: Any) -> Markup:
    """One element; lists of children are put one after the other."""
    start = f"{tag}{''.join(_attribute(name, value) for name, value in attributes.items())}"
    if tag in _HTML_VOID:
        return Markup(f"<{start}>")
    if tag in _SVG_VOID and not children:
        return Markup(f"<{start}/>")
    return Markup(f"<{start}>{join(*children)}</{tag}>")


def join(*children: Any) -> Markup:
    """Children without an element around them."""
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
