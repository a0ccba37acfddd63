"""Charts as SVG, each with a table of the same figures for readers without sight or a mouse.

- Colours come from the style sheet, by class; axis labels are page text.
- Every chart describes itself in `title` and `desc`; the caller leaves out values that are not finite.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coordinator.pages import words
from coordinator.pages.html import Markup, el

WIDTH, HEIGHT = 640, 200
RIGHT, TOP, BOTTOM = 12, 10, 26
LEFT, SIGN, GAP = 64, 9.7, 6
"""The axis is at LEFT, or further right for long labels: SIGN (the widest digit) per character, plus GAP."""

DIGITS = range(3, 10)
"""Numbers of digits to try for axis labels: the first that makes all labels different is used."""

SERIES = 2
"""Number of lines in a chart for which the style sheet has a colour."""

Point = tuple[float, float]
Tell = Callable[[float | None], str]


def lines(
    name: str,
    title: str,
    across: str,
    curves: Mapping[str, Sequence[Point]],
    *,
    tell: Tell = words.figure,
    from_zero: bool = False,
    interval: tuple[str, str] | None = None,
) -> Markup:
    """Draw each of `curves` as a line; the two that `interval` names are bounds, drawn as a band."""
    assert len(curves) - 2 * bool(interval) <= SERIES, "the style sheet has no more colours"
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return _nothing(title)
    scale = _Scale(points, from_zero, tell)
    low, high = interval or ("", "")
    plain = {title: curve for title, curve in curves.items() if title not in (low, high)}
    drawn = []
    if interval:
        around = [*curves[low], *reversed(curves[high])]
        drawn.append(el("polygon", points=scale.places(around), class_="band"))
    drawn += [
        el("polyline", points=scale.places(curve), class_=f"series s{number}")
        for number, curve in enumerate(plain.values())
        if len(curve) > 1
    ]
    drawn += [
        el("circle", cx=f"{scale.x(x):.1f}", cy=f"{scale.y(y):.1f}", r=3, class_=f"dot s{number}")
        for number, curve in enumerate(plain.values())
        for x, y in curve[-1:]
    ]
    by_x = {x: [tell(dict(curve).get(x)) for curve in curves.values()] for x, _ in sorted(points)}
    rows = [[words.figure(x), *values] for x, values in by_x.items()]
    legend = None
    if len(curves) > 1:
        keys = [el("li", text, class_=f"key s{number}") for number, text in enumerate(plain)]
        if interval:
            keys.append(el("li", f"{low} to {high}", class_="key band"))
        legend = el("ul", keys, class_="legend")
    return _figure(name, title, across, scale, drawn, legend, [across, *curves], rows)


def bars(name: str, title: str, across: str, points: Sequence[Point], *, tell: Tell = words.figure) -> Markup:
    """Draw one bar for each of `points`."""
    if not points:
        return _nothing(title)
    low, high = points[0][0] - 0.5, points[-1][0] + 0.5
    scale = _Scale([(low, 0.0), (high, 0.0), *points], True, tell)
    width = 0.8 * (WIDTH - scale.axis - RIGHT) / (high - low)
    drawn = [
        el("rect", x=f"{scale.x(x) - width / 2:.1f}", y=f"{scale.y(y):.1f}", width=f"{width:.1f}",
           height=f"{HEIGHT - BOTTOM - scale.y(y):.1f}", class_="bar s0")
        for x, y in points
    ]  # fmt: skip
    rows = [[words.figure(x), tell(y)] for x, y in points]
    return _figure(name, title, across, scale, drawn, None, [across, title], rows)


class _Scale:
    """The mapping from figures to positions in the picture."""

    def __init__(self, points: Sequence[Point], from_zero: bool, tell: Tell) -> None:
        self.left, self.right = min(x for x, _ in points), max(x for x, _ in points)
        self.bottom, self.top = min(y for _, y in points), max(y for _, y in points)
        if from_zero:
            self.bottom = min(0.0, self.bottom)
        if self.top == self.bottom:
            self.top += abs(self.top) or 1.0
        self.ticks = _ticks([self.bottom, (self.bottom + self.top) / 2, self.top], tell)
        self.axis = min(max(LEFT, GAP + SIGN * max(map(len, self.ticks.values()))), WIDTH / 2)

    def x(self, value: float) -> float:
        share = (value - self.left) / (self.right - self.left) if self.right > self.left else 0.5
        return self.axis + (WIDTH - self.axis - RIGHT) * share

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - self.bottom) / (self.top - self.bottom)

    def places(self, curve: Sequence[Point]) -> str:
        """Return the points of `curve` in SVG notation."""
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in curve)


def _ticks(values: Sequence[float], tell: Tell) -> dict[float, str]:
    """Return the labels of an axis, with as many digits as make them different."""
    labels = [tell(value) for value in values]
    for digits in DIGITS if tell is words.figure else ():
        labels = [words.figure(value, digits) for value in values]
        if len(set(labels)) == len(labels):
            break
    return dict(zip(values, labels, strict=True))


def _figure(
    name: str,
    title: str,
    across: str,
    scale: _Scale,
    drawn: Sequence[Markup],
    legend: Markup | None,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> Markup:
    axes: list[Any] = []
    for value, label in scale.ticks.items():
        y = f"{scale.y(value):.1f}"
        axes.append(el("line", x1=f"{scale.axis:.1f}", x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
        axes.append(el("text", label, x=f"{scale.axis - GAP:.1f}", y=y, class_="end"))
    if len(rows) > 1:
        axes.append(el("text", rows[0][0], x=f"{scale.axis:.1f}", y=HEIGHT - 6))
        axes.append(el("text", f"{across} {rows[-1][0]}", x=WIDTH - RIGHT, y=HEIGHT - 6, class_="end"))
    else:
        middle = f"{(scale.axis + WIDTH - RIGHT) / 2:.1f}"
        axes.append(el("text", f"{across} {rows[0][0]}", x=middle, y=HEIGHT - 6, class_="middle"))
    many, newest = words.counted(len(rows), "point"), ", ".join(rows[-1][1:])
    last = f"{many}; {across} {rows[-1][0]}: {newest}. The table below has all of them."
    svg = el(
        "svg", el("title", title, id=f"{name}-title"), el("desc", last, id=f"{name}-desc"), axes, drawn,
        viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_labelledby=f"{name}-title {name}-desc",
    )  # fmt: skip
    return el("figure", el("figcaption", title), svg, legend, _table(name, title, heads, rows), class_="chart")


def _table(name: str, title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    head = el("tr", (el("th", text, scope="col") for text in heads))
    body = (el("tr", el("th", first, scope="row"), (el("td", cell) for cell in rest)) for first, *rest in rows)
    made = el("table", el("caption", title, class_="quiet"), el("thead", head), el("tbody", body))
    frame = el("div", made, class_="wide", tabindex="0", role="region", aria_label=f"{title}, as a table")
    return el("details", el("summary", "as a table"), frame, id=f"{name}-table")


def _nothing(title: str) -> Markup:
    return el("figure", el("figcaption", title), el("p", "No data yet.", class_="soft"), class_="chart")
