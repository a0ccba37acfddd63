"""Plots are well-formed SVG that shows every figure it was given."""

from xml.etree import ElementTree

import pytest

from coordinator.sim.report import CHARACTER_WIDTH, COLOURS, HEIGHT, TOP, WIDTH, bars, lines

SVG = "{http://www.w3.org/2000/svg}"


def texts(image: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(image).iter(f"{SVG}text")]


def test_every_bar_says_its_value_and_stays_inside_the_picture() -> None:
    image = bars("a < b & c", {"4:8": {"ours": 1.1, "star": 9.75}, "8:8": {"ours": 1.25}}, bound=1.0, top=3.0)
    assert {"a < b & c", "4:8", "8:8", "ours", "star", "1.10", "9.75", "1.25"} <= set(texts(image))
    for box in ElementTree.fromstring(image).iter(f"{SVG}rect"):
        x, y, width, height = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + width <= WIDTH
        assert 0 <= y <= y + height <= HEIGHT


def test_a_group_may_lack_a_series() -> None:
    assert texts(bars("t", {"a": {"x": 1.0}, "b": {"y": 2.0}}, bound=1.0, top=2.0)).count("1.00") == 1


def test_as_many_lines_as_a_plot_may_have_are_told_apart_and_all_named_inside_the_picture() -> None:
    names = [f"corrected, S = {number}" for number in range(len(COLOURS))]
    root = ElementTree.fromstring(lines("t", {name: [(0.0, 0.5), (2.0, 1.0)] for name in names}, right=2.0, top=1.0))
    named = {text.text: text for text in root.iter(f"{SVG}text")}
    for name in names:
        x, y = (float(named[name].attrib[side]) for side in ("x", "y"))
        assert x + CHARACTER_WIDTH * len(name) <= WIDTH
        assert y < TOP
    drawn = [line.attrib["stroke"] for line in root.iter(f"{SVG}polyline")][-len(names) :]
    assert len(set(drawn)) == len(names)


@pytest.mark.parametrize("points", [[], [(0.0, 0.0)], [(0.0, 0.5), (2.0, 1.0), (9.0, 1.0)]])
def test_lines_keep_to_the_right_edge(points: list[tuple[float, float]]) -> None:
    image = lines("t", {"up": points}, right=2.0, top=1.0)
    *_grid, line = ElementTree.fromstring(image).iter(f"{SVG}polyline")
    shown = line.attrib["points"].split()
    assert len(shown) == sum(x <= 2.0 for x, _ in points)
