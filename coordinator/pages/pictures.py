"""Pictures of a node: its portrait, its last day as a small curve, and a badge and a card to show elsewhere.

- A portrait follows from the node's id alone, so that look-alike names are told apart at a glance.
- A badge and a card are whole files, for other sites: they carry their colours, and need no style sheet.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from coordinator.pages import words
from protocol.text.html import Markup, el

CELLS = 5
"""Cells of a portrait in each direction; its right half mirrors the left one."""

HUES = 6
"""Colours of portraits; the style sheet has them as `.face.hue0` and so on, for light and dark pages."""

FILLS = ("#0b6b4b", "#1f5fa8", "#8a4b08", "#7a2f8f", "#a3210f", "#4d5a12")
"""Colours of portraits in files without the style sheet, on white."""

INK, SOFT, PAGE, ACCENT = "#12161a", "#59636e", "#ffffff", "#0b6b4b"

FONT = "Verdana, 'DejaVu Sans', sans-serif"
CHARACTER = 6.6
"""Mean width of a character of the badge's font at 11 px."""

BIG: tuple[int, int, dict[str, Any]] = (420, 52, {"fill": INK, "font_weight": 700})
SMALL: tuple[int, int, dict[str, Any]] = (462, 26, {"fill": SOFT})
"""Height, size and look of a figure on the card, and of what it counts."""

SHORT = 28
"""Characters of a round's title on a badge."""


@dataclass(frozen=True)
class Contribution:
    """The figures of a node that a badge and a card show."""

    node_id: str
    name: str
    title: str
    """The round's title."""
    rank: int
    nodes: int
    tokens: int
    credit: str
    """Amount without the name of its unit."""
    unit: str
    hours: Sequence[int]

    @property
    def place(self) -> str:
        return f"#{words.whole(self.rank)} of {words.whole(self.nodes)}"


def _cells(node_id: str) -> tuple[str, int]:
    """Return the filled cells of a portrait as an SVG path, and the number of its colour."""
    bits = int.from_bytes(sha256(node_id.encode(errors="replace")).digest())
    half = -(-CELLS // 2)
    squares = [
        f"M{column} {row}h1v1h-1z"
        for row in range(CELLS)
        for column in range(CELLS)
        if bits >> (row * half + min(column, CELLS - 1 - column)) & 1
    ]
    return "".join(squares) or "M1 1h3v3h-3z", (bits >> CELLS * half) % HUES


def portrait(node_id: str) -> Markup:
    """Draw a node's portrait for a page."""
    path, hue = _cells(node_id)
    return el(
        "svg", el("path", d=path), viewBox=f"0 0 {CELLS} {CELLS}", width=16, height=16, aria_hidden="true",
        class_=f"face hue{hue}",
    )  # fmt: skip


def _points(values: Sequence[float], width: float, height: float) -> str:
    """Return the points of a curve; nothing if all values are zero."""
    most = max(values, default=0)
    if len(values) < 2 or not most > 0:
        return ""
    step = width / (len(values) - 1)
    return " ".join(f"{place * step:.4g},{height * (1 - value / most):.4g}" for place, value in enumerate(values))


def sparkline(values: Sequence[float], about: str) -> Markup | None:
    """Draw `values` as a small curve that `about` says in words; None if all are zero."""
    if not (points := _points(values, 60, 16)):
        return None
    curve = el("polyline", points=points)
    return el("svg", curve, viewBox="0 -1 60 18", width=60, height=18, role="img", aria_label=about, class_="spark")


def badge(who: Contribution) -> Markup:
    """Draw a badge of 20 px, as README files have them."""
    title = words.line(who.title)
    left = title if len(title) <= SHORT else f"{title[: SHORT - 1].rstrip()}…"
    right = f"{words.short(who.tokens)} tokens · {who.place}"
    split, end = (round(CHARACTER * len(text)) + 14 for text in (left, right))
    texts = (
        el("text", text, x=start + 7, y=14, textLength=width - 14, lengthAdjust="spacingAndGlyphs")
        for text, start, width in ((left, 0, split), (right, split, end))
    )
    return el(
        "svg",
        el("title", f"{words.readable(who.name, who.node_id)} in {title}: {right}"),
        el("rect", width=split + end, height=20, rx=4, fill=INK),
        el("path", d=f"M{split} 0h{end - 4}a4 4 0 0 1 4 4v12a4 4 0 0 1 -4 4h-{end - 4}z", fill=ACCENT),
        el("g", texts, fill=PAGE, font_family=FONT, font_size=11),
        xmlns="http://www.w3.org/2000/svg", width=split + end, height=20, role="img",
    )  # fmt: skip


def card(who: Contribution) -> Markup:
    """Draw a card of 1200 by 630 px: portrait, name, round, and what the node gave."""
    path, hue = _cells(who.node_id)
    name = words.readable(who.name, who.node_id)
    figures = ((words.short(who.tokens), "verified tokens"), (who.credit, who.unit), (who.place, "on the leaderboard"))
    columns = [
        el("text", text, x=80 + 360 * place, y=y, font_size=size, **looks, **_fitted(text, size, 320))
        for place, texts in enumerate(figures)
        for text, (y, size, looks) in zip(texts, (BIG, SMALL), strict=True)
    ]
    curve = el(
        "polyline", points=_points(who.hours, 1040, 80), transform="translate(80 510)", fill="none",
        stroke=FILLS[hue], stroke_width=5, stroke_linejoin="round",
    )  # fmt: skip
    return el(
        "svg",
        el("title", f"{name} in {words.line(who.title)}"),
        el("rect", width=1200, height=630, fill=PAGE),
        el("rect", width=1200, height=12, fill=FILLS[hue]),
        el("path", d=path, transform="translate(80 90) scale(36)", fill=FILLS[hue]),
        el("text", name, x=310, y=175, fill=INK, font_size=64, font_weight=700, **_fitted(name, 64, 810)),
        el("text", f"lends a computer to {words.line(who.title)}", x=310, y=235, fill=SOFT, font_size=32,
           **_fitted(f"lends a computer to {words.line(who.title)}", 32, 810)),
        columns,
        curve,
        xmlns="http://www.w3.org/2000/svg", width=1200, height=630, viewBox="0 0 1200 630", role="img",
        font_family=FONT,
    )  # fmt: skip


def _fitted(text: str, size: int, most: int) -> dict[str, object]:
    """Return the attributes that press a long text into `most` pixels."""
    return {"textLength": most, "lengthAdjust": "spacingAndGlyphs"} if 0.62 * size * len(text) > most else {}
