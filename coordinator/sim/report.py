"""What is told of a run: figures once the pipeline is full, beside what the capacity model foretells."""

import math
from collections import Counter
from typing import Any

from coordinator.health import percentile
from coordinator.sim.scenario import Scenario
from coordinator.sim.world import Outcome

WARM_UP = 0.2
"""The first updates, while the pipeline fills and rates are learned, are left out of shares and costs."""


def figures(scenario: Scenario, outcome: Outcome) -> dict[str, Any]:
    """Everything that is reported, for scripts."""
    kappa, load, rule = scenario.interval, scenario.load, scenario.rule
    least = rule.min_rate(load, kappa)
    pool_rate = scenario.pool.nodes * scenario.pool.at_once / scenario.pool.group_s
    done = outcome.steps[int(WARM_UP * len(outcome.steps)) :]
    waited_s = sum(step.waited_s for step in done[1:])
    span_s = done[-1].formed_s - done[0].formed_s if done else 0.0
    ages = sum((step.ages for step in done), Counter[int]())
    in_vain = sum(outcome.discarded.values())
    return {
        "updates": len(outcome.steps),
        "finished": len(outcome.steps) == scenario.updates,
        "hours": outcome.ended_s / 3600,
        "kappa": kappa,
        "least_groups_per_s": least if least < math.inf else None,
        "pool_groups_per_s": pool_rate,
        "bubble": waited_s / span_s if span_s else 1.0,
        "bubble_foretold": rule.bubble(load, kappa, pool_rate),
        "age_mean": sum(age * count for age, count in ages.items()) / max(1, ages.total()),
        "age_p99": percentile(ages, 0.99),
        "age_max": max(ages, default=0),
        "discarded_share": in_vain / max(1, in_vain + outcome.accepted),
        "discarded": dict(outcome.discarded),
        "working_mean": sum(step.working for step in done) / max(1, len(done)),
        "cost_per_update": (done[-1].spent - done[0].spent) / (len(done) - 1) if len(done) > 1 else 0.0,
        "fleet_changes": len(outcome.changes),
        "events": outcome.events,
    }


def text(scenario: Scenario, found: dict[str, Any]) -> str:
    """The same in words."""
    pool, least = scenario.pool, found["least_groups_per_s"]
    enough = "no pool is enough" if least is None else f"the learner needs {least:.4g}"
    lines = [
        f"{pool.nodes} nodes, {found['updates']} updates of {scenario.groups_per_update} groups, "
        f"{found['hours']:.2f} hours of the swarm's time, {found['events']:,} events",
        f"S = {scenario.staleness}, kappa = {found['kappa']}, admission {scenario.admission}",
        f"throughput       {found['pool_groups_per_s']:.4g} groups/s in the pool; {enough}",
        f"learner idle     {found['bubble']:.1%}; foretold for everybody at work: {found['bubble_foretold']:.1%}",
        f"age trained on   mean {found['age_mean']:.2f}, p99 {found['age_p99']}, max {found['age_max']} updates",
        f"sampled in vain  {found['discarded_share']:.2%}"
        + "".join(f"; {why}: {count:,}" for why, count in sorted(found["discarded"].items()) if count),
        f"at work          {found['working_mean']:.1f} nodes on average, {found['fleet_changes']} changes of the fleet",
        f"cost             {found['cost_per_update']:.4g} per update, the learner included",
    ]
    if not found["finished"]:
        lines.append("The round came to a stop: nobody could sample what the learner waits for.")
    return "\n".join(lines)
