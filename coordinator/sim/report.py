"""The results of a run after its warm-up, with the capacity model's predictions: figures, text, plots.

- Pure: figures in, text out.
- Plots are SVG text, small enough to read: grouped bars with a bound, and lines over time. The colours differ in print
  and for colour-blind readers; every bar has its value.
"""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from xml.sax.saxutils import escape

from coordinator.reports.health import percentile
from coordinator.rules.fleet_choice import Change
from coordinator.sim.scenario import Scenario


@dataclass(frozen=True)
class SimulatedUpdate:
    """An update: the time at which its batch was formed, the learner's wait, and the ages of its groups."""

    update: int
    formed_s: float
    waited_s: float
    ages: Counter[int]
    working: int
    spent: float
    discarded: float
    """The wasted groups since the beginning."""


@dataclass
class SimulationOutcome:
    """All counters of a run."""

    steps: list[SimulatedUpdate] = field(default_factory=list)
    discarded: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Wasted groups, or parts of them, by the reason."""
    continued: int = 0
    """Groups that another node continued."""
    helped: int = 0
    """Late groups that were leased to a second node."""
    forged: int = 0
    """Forged groups that were accepted."""
    trained_forged: int = 0
    """Forged groups that were trained on."""
    banned: int = 0
    spreads_s: list[float] = field(default_factory=list)
    """The time from each publication until half of the nodes could sample from it."""
    changes: list[tuple[float, Change]] = field(default_factory=list)
    events: int = 0
    ended_s: float = 0.0
    spent: float = 0.0
    trace: str = ""
    """A hash of all events in their order: equal runs have equal hashes."""


class Trace:
    """The hash of a run's events so far."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, moment_s: float, what: str) -> None:
        self._hash.update(f"{moment_s!r} {what}\n".encode())

    def __str__(self) -> str:
        return self._hash.hexdigest()


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


WARM_UP = 0.2
"""The share of first updates that is left out of shares and costs: the pipeline fills and rates are learned."""

Curves = dict[str, list[tuple[float, float]]]

STRETCHES = 50
"""The points of a curve, each the mean of a stretch of updates."""


def figures(scenario: Scenario, outcome: SimulationOutcome) -> dict[str, Any]:
    """Return all figures of the report, for scripts."""
    kappa, load, rule = scenario.interval, scenario.load, scenario.rule
    least = rule.min_rate(load, kappa)
    pool_rate = scenario.pool.nodes * scenario.pool.at_once / scenario.pool.group_s
    done = outcome.steps[int(WARM_UP * len(outcome.steps)) :]
    waited_s = sum(step.waited_s for step in done[1:])
    span_s = done[-1].formed_s - done[0].formed_s if done else 0.0
    ages = sum((step.ages for step in done), Counter[int]())
    in_vain = sum(outcome.discarded.values())
    trained = sum(step.ages.total() for step in outcome.steps)
    return {
        "updates": len(outcome.steps),
        "finished": len(outcome.steps) == scenario.updates,
        "hours": outcome.ended_s / 3600,
        "kappa": kappa,
        "least_groups_per_s": least if least < math.inf else None,
        "pool_groups_per_s": pool_rate,
        "bubble": waited_s / span_s if span_s else 1.0,
        "bubble_foretold": rule.bubble(load, kappa, pool_rate),
        "step_s": span_s / (len(done) - 1) if len(done) > 1 else 0.0,
        "broadcast_median_s": median(outcome.spreads_s) if outcome.spreads_s else None,
        "age_mean": sum(age * count for age, count in ages.items()) / max(1, ages.total()),
        "age_p99": percentile(ages, 0.99),
        "age_max": max(ages, default=0),
        "discarded_share": in_vain / max(1, in_vain + trained),
        "discarded": dict(outcome.discarded),
        "continued": outcome.continued,
        "given_twice": outcome.helped,
        "forged_share": outcome.trained_forged / max(1, trained),
        "forged": outcome.forged,
        "banned": outcome.banned,
        "working_mean": sum(step.working for step in done) / max(1, len(done)),
        "cost_per_update": (done[-1].spent - done[0].spent) / (len(done) - 1) if len(done) > 1 else 0.0,
        "fleet_changes": len(outcome.changes),
        "events": outcome.events,
        "trace": outcome.trace,
    }


def text(scenario: Scenario, found: dict[str, Any]) -> str:
    """Return the figures `found` as text."""
    pool, least = scenario.pool, found["least_groups_per_s"]
    enough = "no pool is enough" if least is None else f"the learner needs {least:.4g}"
    lines = [
        f"{pool.nodes} nodes, {found['updates']} updates of {scenario.groups_per_update} groups, "
        f"{found['hours']:.2f} hours of the swarm's time, {found['events']:,} events",
        f"S = {scenario.staleness}, kappa = {found['kappa']}, admission {scenario.admission}",
        f"throughput       {found['pool_groups_per_s']:.4g} groups/s in the pool; {enough}",
        f"learner idle     {found['bubble']:.1%}; predicted with all nodes working: {found['bubble_foretold']:.1%}",
        f"an update        every {found['step_s']:.4g} s",
        f"age trained on   mean {found['age_mean']:.2f}, p99 {found['age_p99']}, max {found['age_max']} updates",
        f"wasted samples   {found['discarded_share']:.2%}"
        + "".join(f"; {why}: {count:,.0f}" for why, count in sorted(found["discarded"].items()) if count >= 0.5),
        f"working          {found['working_mean']:.1f} nodes on average, {found['fleet_changes']} changes of the fleet",
        f"cost             {found['cost_per_update']:.4g} per update, the learner included",
    ]
    if found["broadcast_median_s"] is not None:
        lines.insert(5, f"a version        {found['broadcast_median_s']:.4g} s until half of the nodes sample from it")
    if found["continued"] or found["given_twice"]:
        lines.append(f"rescued          {found['continued']:,} continued, {found['given_twice']:,} leased twice")
    if pool.liars:
        lines.append(
            f"forgers          {found['banned']} banned; {found['forged']:,} forgeries accepted, "
            f"{found['forged_share']:.2%} of what was trained on"
        )
    if not found["finished"]:
        lines.append("The round stalled: no node could sample the groups that the learner waits for.")
    return "\n".join(lines)


def draw(outcome: SimulationOutcome, folder: Path) -> list[Path]:
    """Draw the run over its updates, as three plots; return their files."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = outcome.steps
    stride = max(1, math.ceil(len(steps) / STRETCHES))
    pieces = [piece for start in range(0, len(steps), stride) if len(piece := steps[start : start + stride + 1]) > 1]
    right = float(max(2, len(steps)))
    shares: Curves = {
        "learner idle": [(piece[-1].update, _idle(piece)) for piece in pieces],
        "wasted samples": [(piece[-1].update, _in_vain(piece)) for piece in pieces],
    }
    ages: Curves = {
        "mean": [(piece[-1].update, _age(piece)) for piece in pieces],
        "most": [(piece[-1].update, max(age for step in piece for age in step.ages)) for piece in pieces],
    }
    costs: Curves = {
        "cost": [(piece[-1].update, (piece[-1].spent - piece[0].spent) / (len(piece) - 1)) for piece in pieces]
    }
    made = {
        "shares": lines("Shares, by update", shares, right=right, top=_top(shares, 1.0)),
        "ages": lines("Age of what was trained on, in updates", ages, right=right, top=_top(ages, 1.0)),
        "cost": lines("Cost of an update, the learner included", costs, right=right, top=_top(costs)),
    }
    paths = []
    for name, drawn in made.items():
        paths.append(folder / f"simulated_{name}.svg")
        paths[-1].write_text(drawn)
    return paths


def _idle(piece: list[SimulatedUpdate]) -> float:
    span_s = piece[-1].formed_s - piece[0].formed_s
    return sum(step.waited_s for step in piece[1:]) / span_s if span_s else 0.0


def _in_vain(piece: list[SimulatedUpdate]) -> float:
    vain = piece[-1].discarded - piece[0].discarded
    return vain / (vain + sum(step.ages.total() for step in piece[1:]))


def _age(piece: list[SimulatedUpdate]) -> float:
    ages = sum((step.ages for step in piece), Counter[int]())
    return sum(age * count for age, count in ages.items()) / ages.total()


def _top(curves: Curves, least: float = 1e-9) -> float:
    return max([least, *(1.1 * value for points in curves.values() for _, value in points)])
