"""The plan of a running round, from the measurements of its learner, its broadcasts and each of its nodes; pure.

- The fleet keeps the cheapest nodes that give γ times the least throughput, at their measured rates and current
  prices. If all nodes together are not enough, it keeps all, and the plan shows how long the learner waits.
- A sensitivity is the same plan with one quantity a quarter larger, or without the fastest node.
- A pool that would need a century between two publications gets no time and no cost: nodes claim any rate, and a rate
  near 0 would give a time or a cost that no number holds.
- Costs are micro-units, as nodes ask them; the operator states the learner's price.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from coordinator.reports.planning import LARGER, STALENESS_SHOWN
from coordinator.rules.capacity import VISIBLE, PoolLoad, least_staleness
from coordinator.rules.fleet_choice import FleetCandidate, cheapest_cover
from protocol.text.plain import counted

MICROS = 1_000_000

NEVER_S = 100 * 365 * 86_400.0
"""A period from this length on counts as endless: the next publication never comes."""


@dataclass(frozen=True)
class Live:
    """The measurements of a running round, and the operator's settings."""

    load: PoolLoad
    kappa: int
    """The setting; 0 follows the measurements."""
    gamma: float
    nodes: Sequence[FleetCandidate]
    learner_cost: float = 0.0
    """Micro-units a second."""


@dataclass(frozen=True)
class Advice:
    """The result of a plan: the nodes to keep, and the round's speed and cost with them."""

    staleness: int
    kappa: int
    groups_per_s: float | None
    """The least rate at which the learner never waits; None if no pool is enough."""
    nodes: int
    given_per_s: float
    """The rate of these nodes together."""
    idle: float
    step_s: float | None
    cost_per_update: float | None
    """The cost in the operator's unit; None, like `step_s`, if the period is endless."""


def live(found: dict[str, Any], gamma: float, learner_price_per_hour: float) -> Live:
    """Return the measurements in the answer of a running coordinator."""
    return Live(
        load=PoolLoad(**found["load"]),
        kappa=found["publish_every"],
        gamma=gamma,
        nodes=[
            FleetCandidate(node["name"], node["groups_per_s"], node["cost_micros_per_s"]) for node in found["nodes"]
        ],
        learner_cost=learner_price_per_hour * MICROS / 3600,
    )


def advise(now: Live) -> Advice:
    """Return the nodes to keep, and the round's speed and cost with them."""
    kappa = now.kappa or VISIBLE.kappa(now.load)
    least = VISIBLE.min_rate(now.load, kappa)
    kept = cheapest_cover(now.nodes, now.gamma * least)
    rate, cost = sum(node.rate for node in kept), now.learner_cost + sum(node.cost for node in kept)
    period_s = VISIBLE.period_s(now.load, kappa, rate)
    moves = period_s < NEVER_S
    return Advice(
        staleness=now.load.staleness,
        kappa=kappa,
        groups_per_s=least if least < float("inf") else None,
        nodes=len(kept),
        given_per_s=rate,
        idle=VISIBLE.bubble(now.load, kappa, rate),
        step_s=period_s / kappa if moves else None,
        cost_per_update=cost * period_s / kappa / MICROS if moves else None,
    )


def sensitivity(now: Live) -> dict[str, Advice]:
    """Return the plan with one quantity changed, by the name of the change."""
    load, more = now.load, f"by {LARGER - 1:.0%}"
    slower = [replace(node, rate=node.rate / LARGER) for node in now.nodes]
    dearer = [replace(node, cost=node.cost * LARGER) for node in now.nodes]
    fastest = max(now.nodes, key=lambda node: (node.rate, node.name), default=None)
    changed = {
        f"an update takes longer {more}": replace(now, load=replace(load, train_s=LARGER * load.train_s)),
        f"a broadcast takes longer {more}": replace(now, load=replace(load, broadcast_s=LARGER * load.broadcast_s)),
        f"groups take longer {more}": replace(now, load=replace(load, rollout_s=LARGER * load.rollout_s), nodes=slower),
        f"nodes are dearer {more}": replace(now, nodes=dearer),
        f"the learner is dearer {more}": replace(now, learner_cost=LARGER * now.learner_cost),
        "the fastest node leaves": replace(now, nodes=[node for node in now.nodes if node is not fastest]),
        "S is one larger": replace(now, load=replace(load, staleness=load.staleness + 1)),
    }
    return {name: advise(variant) for name, variant in changed.items()}


def report(now: Live) -> dict[str, Any]:
    """Return all results at once, for scripts."""
    bounds = sorted({*STALENESS_SHOWN, now.load.staleness})
    free = replace(now, kappa=0)
    return {
        "load": asdict(now.load),
        "gamma": now.gamma,
        "nodes": [asdict(node) for node in sorted(now.nodes, key=lambda node: (node.cost_per_group, node.name))],
        "plan": asdict(advise(now)),
        "least_staleness": least_staleness(now.load),
        "by_staleness": [
            asdict(advise(replace(free, load=replace(now.load, staleness=staleness)))) for staleness in bounds
        ],
        "sensitivity": {name: asdict(advice) for name, advice in sensitivity(now).items()},
    }


def text(found: dict[str, Any]) -> str:
    """Return the report `found` as text."""
    load, nodes = found["load"], found["nodes"]
    rate = sum(node["rate"] for node in nodes)
    lines = [
        f"Measured: an update takes {load['train_s']:.4g} s, a broadcast {load['broadcast_s']:.4g} s, "
        f"a group {load['rollout_s']:.4g} s; {counted(len(nodes), 'node')} give {rate:.4g} groups/s in total.",
        f"Cheapest nodes that give {found['gamma']:g} times the throughput that the learner needs:",
        "",
        f"{'':<36} {_HEADINGS}",
        f"{'as it is':<36} {_row(found['plan'])}",
        *(f"{name:<36} {_row(advice)}" for name, advice in found["sensitivity"].items()),
        "",
        f"{'S':<36} {_HEADINGS}",
        *(f"{advice['staleness']:<36} {_row(advice)}" for advice in found["by_staleness"]),
    ]
    if found["plan"]["groups_per_s"] is None:
        lines += ["", f"No number of nodes is enough. Use S = {found['least_staleness']} or more."]
    return "\n".join(lines)


_HEADINGS = f"{'kappa':>5} {'needs/s':>9} {'gives/s':>9} {'nodes':>6} {'idle':>6} {'s/update':>9} {'cost/update':>11}"


def _row(advice: dict[str, Any]) -> str:
    needs, step_s, cost = (
        "-" if advice[name] is None else f"{advice[name]:.4g}" for name in ("groups_per_s", "step_s", "cost_per_update")
    )
    gives, idle = f"{advice['given_per_s']:.4g}", f"{advice['idle']:.0%}"
    return f"{advice['kappa']:>5} {needs:>9} {gives:>9} {advice['nodes']:>6} {idle:>6} {step_s:>9} {cost:>11}"
