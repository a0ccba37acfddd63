"""Charts as SVG, each with a table of the same figures for readers without sight or a mouse.

- The picture stretches to the width of its frame, and its lines keep their width. Its labels are text of the page
  beside it, so they have the same size on every screen.
- Colours come from the style sheet, by class.
- Every chart describes itself in `title` and `desc`; the caller leaves out values that are not finite.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, inf, log10
from typing import Any

from coordinator.pages import words
from protocol.text.html import Markup, el

SIDE = 100
"""Width and height of the picture in its own units."""

DIGITS = range(3, 10)
"""Numbers of digits to try for axis labels: the first that makes all labels different is used."""

SERIES = 2
"""Number of lines in a chart for which the style sheet has a colour."""

TICKS_MAX = 5
"""The most labels of the vertical axis."""

STEPS = (1.0, 2.0, 2.5, 5.0, 10.0, 20.0)
"""Distances between labels, in powers of ten: the first with which few enough cover the figures is used."""

SLACK = 1e-9
"""The part of a step by which a figure may miss a label through rounding."""

MARKS_MAX = 60
"""The most marks below a curve; of more, every second, third, … is drawn."""

BAR_SHARE = 0.7
"""The share of its place that a bar fills."""

Point = tuple[float, float]
Tell = Callable[[float | None], str]


@dataclass(frozen=True)
class Caption:
    """The title of a chart in words, the name that programs use for it, and a line that explains it."""

    title: str
    raw: str = ""
    about: str = ""


def is_flat(points: Sequence[Point]) -> bool:
    """Return True if a curve of several points never changes visibly."""
    values = [y for _, y in points]
    return len(values) > 1 and max(values) - min(values) <= 1e-9 * max(map(abs, values))


def lines(
    name: str,
    title: str | Caption,
    across: str,
    curves: Mapping[str, Sequence[Point]],
    *,
    tell: Tell = words.figure,
    from_zero: bool = False,
    interval: tuple[str, str] | None = None,
    marks: Mapping[float, str] | None = None,
) -> Markup:
    """Draw each of `curves` as a line; the two that `interval` names are bounds, drawn as a band.

    `marks` are drawn below the curve, each at its place, with a text.
    """
    assert len(curves) - 2 * bool(interval) <= SERIES, "the style sheet has no more colours"
    caption = title if isinstance(title, Caption) else Caption(title)
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return _nothing(caption)
    scale = _Scale(points, from_zero, tell)
    low, high = interval or ("", "")
    plain = {title: curve for title, curve in curves.items() if title not in (low, high)}
    drawn: list[Any] = [_marks(marks or {}, scale)]
    if interval:
        around = [*curves[low], *reversed(curves[high])]
        drawn.append(el("polygon", points=scale.places(around), class_="band"))
    for number, curve in enumerate(plain.values()):
        if len(curve) > 1:
            drawn.append(el("polyline", points=scale.places(curve), class_=f"series s{number}"))
    for number, curve in enumerate(plain.values()):
        if curve:
            drawn.append(_dot(scale, curve[-1], number))
    by_x = {x: [tell(dict(curve).get(x)) for curve in curves.values()] for x, _ in sorted(points)}
    rows = [[words.figure(x), *values] for x, values in by_x.items()]
    legend = _legend(list(plain) if len(curves) > 1 else [], interval, has_marks=bool(marks))
    return _figure(name, caption, across, scale, drawn, legend, [across, *curves], rows)


def _dot(scale: "_Scale", point: Point, number: int) -> Markup:
    x, y = point
    return el("path", d=f"M{scale.x(x):.2f} {scale.y(y):.2f}h0", class_=f"dot s{number}")


def _legend(curves: Sequence[str], interval: tuple[str, str] | None, *, has_marks: bool) -> Markup | None:
    """Build the names of a chart's curves, band and marks; None if there is nothing to tell apart."""
    keys = [el("li", title, class_=f"key s{number}") for number, title in enumerate(curves)]
    if interval:
        keys.append(el("li", " to ".join(interval), class_="key band"))
    if has_marks:
        keys.append(el("li", "version published", class_="key mark"))
    return el("ul", keys, class_="legend") if keys else None


def bars(name: str, title: str | Caption, across: str, points: Sequence[Point]) -> Markup:
    """Draw a bar for each point, from zero."""
    caption = title if isinstance(title, Caption) else Caption(title)
    if not points:
        return _nothing(caption)
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    step = min((b - a for (a, _), (b, _) in zip(sorted(points), sorted(points)[1:], strict=False)), default=1.0) or 1.0
    scale = _Scale([(left - step / 2, 0.0), (right + step / 2, 0.0), *points], True, words.figure)
    width = BAR_SHARE * SIDE * step / (right - left + step)
    drawn = [
        el(
            "rect", x=f"{scale.x(x) - width / 2:.2f}", y=f"{min(scale.y(y), scale.y(0.0)):.2f}",
            width=f"{width:.2f}", height=f"{abs(scale.y(0.0) - scale.y(y)):.2f}", class_="bar s0",
        )
        for x, y in points
    ]  # fmt: skip
    rows = [[words.figure(x), words.figure(y)] for x, y in points]
    return _figure(name, caption, across, scale, drawn, None, [across, caption.title], rows, newest="")


def _marks(marks: Mapping[float, str], scale: "_Scale") -> list[Markup]:
    every = max(1, -(-len(marks) // MARKS_MAX))
    kept = [(x, text) for x, text in list(marks.items())[::-1][::every] if scale.left <= x <= scale.right]
    return [
        el(
            "line",
            el("title", text),
            x1=f"{scale.x(x):.2f}",
            x2=f"{scale.x(x):.2f}",
            y1=SIDE - 5,
            y2=SIDE,
            class_="mark",
        )
        for x, text in kept
    ]


class _Scale:
    """The mapping from figures to positions in the picture; it begins and ends at round figures, evenly spaced."""

    def __init__(self, points: Sequence[Point], from_zero: bool, tell: Tell) -> None:
        self.left, self.right = min(x for x, _ in points), max(x for x, _ in points)
        bottom, top = min(y for _, y in points), max(y for _, y in points)
        if from_zero:
            bottom, top = min(0.0, bottom), max(0.0, top)
        if top == bottom:
            top += abs(top) or 1.0
        values = _round_figures(bottom, top)
        self.bottom, self.top = values[0], values[-1]
        self.ticks = _ticks(values, tell)

    def x(self, value: float) -> float:
        return SIDE * ((value - self.left) / (self.right - self.left) if self.right > self.left else 0.5)

    def y(self, value: float) -> float:
        return SIDE - SIDE * (value - self.bottom) / (self.top - self.bottom)

    def places(self, curve: Sequence[Point]) -> str:
        """Return the points of `curve` in SVG notation."""
        return " ".join(f"{self.x(x):.2f},{self.y(y):.2f}" for x, y in curve)


def _round_figures(bottom: float, top: float) -> list[float]:
    """Return evenly spaced round figures around `bottom` and `top`, at most `TICKS_MAX`."""
    least = (top - bottom) / (TICKS_MAX - 1)
    if not 0 < least < inf:
        return [bottom, top]
    power = 10.0 ** floor(log10(least))
    for step in (factor * power for factor in STEPS):
        first, last = floor(bottom / step + SLACK), ceil(top / step - SLACK)
        if step > 0 and last - first < TICKS_MAX:
            return [round(number * step, 12 - floor(log10(step))) for number in range(first, last + 1)]
    return [bottom, top]


def _ticks(values: Sequence[float], tell: Tell) -> dict[float, str]:
    """Return the labels of an axis, with as many digits as make them different, and no more."""
    labels = [tell(value) for value in values]
    for digits in DIGITS if tell is words.figure else ():
        labels = [words.figure(value, digits) for value in values]
        if len(set(labels)) == len(labels):
            break
    if all(".0\u202f" in label for label in labels):
        labels = [label.replace(".0\u202f", "\u202f") for label in labels]
    return dict(zip(values, labels, strict=True))


def _figure(
    name: str,
    caption: Caption,
    across: str,
    scale: _Scale,
    drawn: Sequence[Markup],
    legend: Markup | None,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    newest: str | None = None,
) -> Markup:
    """Build a chart; `newest` is shown beside its title, by default the first figure of the last row."""
    grid = [
        el("line", x1=0, x2=SIDE, y1=f"{scale.y(value):.2f}", y2=f"{scale.y(value):.2f}", class_="grid")
        for value in scale.ticks
    ]
    many, last_row = words.counted(len(rows), "point"), ", ".join(rows[-1][1:])
    last = f"{many}; {across} {rows[-1][0]}: {last_row}. The table below has all of them."
    svg = el(
        "svg", el("title", caption.title, id=f"{name}-title"), el("desc", last, id=f"{name}-desc"), grid, drawn,
        viewBox=f"0 0 {SIDE} {SIDE}", preserveAspectRatio="none", role="img",
        aria_labelledby=f"{name}-title {name}-desc",
    )  # fmt: skip
    up = (el("span", label) for label in reversed(scale.ticks.values()))
    ends = [rows[0][0], f"{across} {rows[-1][0]}"] if len(rows) > 1 else [f"{across} {rows[0][0]}"]
    along = el("div", (el("span", label) for label in ends), class_="along" if len(ends) > 1 else "along single")
    plot = el("div", el("div", up, class_="up", aria_hidden="true"), svg, along, class_="plot")
    return el(
        "figure",
        _caption(caption, rows[-1][1] if newest is None else newest),
        plot,
        legend,
        _table(name, caption.title, heads, rows),
        class_="chart",
    )


def _caption(caption: Caption, newest: str = "") -> Markup:
    return el(
        "figcaption",
        el("span", caption.title, class_="name"),
        el("span", newest, class_="newest") if newest else None,
        el("span", caption.about, " " if caption.about else None, el("code", caption.raw) if caption.raw else None,
           class_="about") if caption.about or caption.raw else None,
    )  # fmt: skip


def _table(name: str, title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    head = el("tr", (el("th", text, scope="col") for text in heads))
    body = (el("tr", el("th", first, scope="row"), (el("td", cell) for cell in rest)) for first, *rest in rows)
    made = el("table", el("caption", title, class_="quiet"), el("thead", head), el("tbody", body))
    frame = el("div", made, class_="wide", tabindex="0", role="region", aria_label=f"{title}, as a table")
    return el("details", el("summary", "as a table"), frame, id=f"{name}-table")


def _nothing(caption: Caption) -> Markup:
    return el("figure", _caption(caption), el("p", "No data yet.", class_="soft"), class_="chart")
