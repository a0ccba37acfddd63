"""The report on a run after its warm-up, with the capacity model's predictions: figures, text, plots."""

import math
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from coordinator.reports.health import percentile
from coordinator.sim import plot
from coordinator.sim.outcome import SimulatedUpdate, SimulationOutcome
from coordinator.sim.scenario import Scenario

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
        "shares": plot.lines("Shares, by update", shares, right=right, top=_top(shares, 1.0)),
        "ages": plot.lines("Age of what was trained on, in updates", ages, right=right, top=_top(ages, 1.0)),
        "cost": plot.lines("Cost of an update, the learner included", costs, right=right, top=_top(costs)),
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
