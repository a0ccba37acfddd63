"""Plots as SVG text, small enough to read: grouped bars with a bound, and lines over time.

- Pure: figures in, text out. The colours differ in print and for colour-blind readers; every bar has its value.
"""

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

COLOURS = ("#0072b2", "#e69f00", "#999999", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#000000")

WIDTH, HEIGHT = 900, 340
LEFT, RIGHT, TOP, BOTTOM = 50, 10, 75, 40

BAR_MAX = 60.0
CHARACTER_WIDTH, LEGEND_HEIGHT = 7, 16
"""The size of a name in the legend, which has room for three rows."""

LABEL_WIDTH = 28
"""The width of a bar's label; on a narrower bar the label is vertical."""


def bars(title: str, groups: Mapping[str, Mapping[str, float]], *, bound: float, top: float) -> str:
    """Return a plot with a bar per series in each group; bars above `top` are cut, and keep their value as label."""
    series = list(dict.fromkeys(name for values in groups.values() for name in values))
    step = (WIDTH - LEFT - RIGHT) / max(1, len(groups))
    width = min(BAR_MAX, 0.85 * step / max(1, len(series)))
    parts = []
    for place, (group, values) in enumerate(groups.items()):
        start = LEFT + (place + 0.5) * step - 0.5 * width * len(series)
        for number, name in enumerate(series):
            if name in values:
                x, y = start + number * width, _y(min(values[name], top), top)
                parts.append(_box(x, y, width - 2, HEIGHT - BOTTOM - y, COLOURS[number % len(COLOURS)]))
                parts.append(_label(x + width / 2 - 1, y - 4, f"{values[name]:.2f}", upright=width < LABEL_WIDTH))
        parts.append(_text(LEFT + (place + 0.5) * step, HEIGHT - BOTTOM + 18, group, size=11, anchor="middle"))
    return _frame(
        title, series, top, [*parts, _line([(LEFT, _y(bound, top)), (WIDTH - RIGHT, _y(bound, top))], "#000")]
    )


def lines(title: str, curves: Mapping[str, Sequence[tuple[float, float]]], *, right: float, top: float) -> str:
    """Return a plot with a line per series, x from 0 to `right` and y from 0 to `top`."""
    parts = []
    for number, points in enumerate(curves.values()):
        scaled = [(LEFT + (WIDTH - LEFT - RIGHT) * x / right, _y(min(y, top), top)) for x, y in points if x <= right]
        parts.append(_line(scaled, COLOURS[number % len(COLOURS)]))
    parts.append(_text(WIDTH - RIGHT, HEIGHT - BOTTOM + 18, f"{right:g}", anchor="end"))
    return _frame(title, list(curves), top, parts)


def _frame(title: str, series: Sequence[str], top: float, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    frame = [_box(0, 0, WIDTH, HEIGHT, "#fff"), _text(LEFT, 18, title, size=14)]
    x, y = float(LEFT), 26.0
    for number, name in enumerate(series):
        if (width := 14 + CHARACTER_WIDTH * len(name)) > WIDTH - RIGHT - x:
            x, y = float(LEFT), y + LEGEND_HEIGHT
        frame += [_box(x, y, 10, 10, COLOURS[number % len(COLOURS)]), _text(x + 14, y + 9, name)]
        x += width + 16
    for share in range(5):
        value = top * share / 4
        frame.append(_line([(LEFT, _y(value, top)), (WIDTH - RIGHT, _y(value, top))], "#ddd"))
        frame.append(_text(LEFT - 6, _y(value, top) + 4, f"{value:g}", anchor="end"))
    return "\n".join([head, *frame, *parts, "</svg>"]) + "\n"


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'


def _label(x: float, y: float, text: str, *, upright: bool) -> str:
    if not upright:
        return _text(x, y, text, size=10, anchor="middle")
    turned = f'transform="translate({x + 4:.1f},{y:.1f}) rotate(-90)" font-size="10"'
    return f"<text {turned}>{escape(text)}</text>"


def _line(points: Sequence[tuple[float, float]], colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
