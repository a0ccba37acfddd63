"""The plan of a round that runs: from what is measured of its learner, its broadcasts and each of its nodes; pure.

- Whom the fleet would keep at work: the cheapest nodes that give γ times the least throughput, at their measured rates
  and today's prices. Where all together are not enough, everybody, and how long the learner then waits.
- A sensitivity is the same with one thing a quarter larger, or with the fastest node gone.
- A pool that would need a century from one publication to the next moves nothing: nodes claim what they like, and next
  to no rate would make a time or a cost that no number holds.
- Costs are micro-units, as nodes ask them; the learner's price is the operator's own to say.
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
"""From here on nobody waits for the next publication."""


@dataclass(frozen=True)
class Live:
    """What is measured, and what the operator set."""

    load: PoolLoad
    kappa: int
    """As it is set; 0 follows what is measured."""
    gamma: float
    nodes: Sequence[FleetCandidate]
    learner_cost: float = 0.0
    """Micro-units a second."""


@dataclass(frozen=True)
class Advice:
    """What the round comes to with the nodes that it would keep."""

    staleness: int
    kappa: int
    groups_per_s: float | None
    """The least at which the learner never waits; None if no pool is enough."""
    nodes: int
    given_per_s: float
    """What these nodes give."""
    idle: float
    step_s: float | None
    cost_per_update: float | None
    """In the operator's unit; neither where nothing moves."""


def live(found: dict[str, Any], gamma: float, learner_price_per_hour: float) -> Live:
    """From what a running coordinator answers."""
    return Live(
        load=PoolLoad(**found["load"]),
        kappa=found["publish_every"],
        gamma=gamma,
        nodes=[FleetCandidate(one["name"], one["groups_per_s"], one["cost_micros_per_s"]) for one in found["nodes"]],
        learner_cost=learner_price_per_hour * MICROS / 3600,
    )


def advise(now: Live) -> Advice:
    """Whom to keep, and what follows."""
    kappa = now.kappa or VISIBLE.kappa(now.load)
    least = VISIBLE.min_rate(now.load, kappa)
    kept = cheapest_cover(now.nodes, now.gamma * least)
    rate, cost = sum(one.rate for one in kept), now.learner_cost + sum(one.cost for one in kept)
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
    """The same with one thing changed, by the name of the change."""
    load, more = now.load, f"by {LARGER - 1:.0%}"
    slower = [replace(one, rate=one.rate / LARGER) for one in now.nodes]
    dearer = [replace(one, cost=one.cost * LARGER) for one in now.nodes]
    fastest = max(now.nodes, key=lambda one: (one.rate, one.name), default=None)
    changed = {
        f"an update takes longer {more}": replace(now, load=replace(load, train_s=LARGER * load.train_s)),
        f"a broadcast takes longer {more}": replace(now, load=replace(load, broadcast_s=LARGER * load.broadcast_s)),
        f"groups take longer {more}": replace(now, load=replace(load, rollout_s=LARGER * load.rollout_s), nodes=slower),
        f"nodes are dearer {more}": replace(now, nodes=dearer),
        f"the learner is dearer {more}": replace(now, learner_cost=LARGER * now.learner_cost),
        "the fastest node leaves": replace(now, nodes=[one for one in now.nodes if one is not fastest]),
        "S is one larger": replace(now, load=replace(load, staleness=load.staleness + 1)),
    }
    return {name: advise(one) for name, one in changed.items()}


def report(now: Live) -> dict[str, Any]:
    """Everything at once, for scripts."""
    bounds = sorted({*STALENESS_SHOWN, now.load.staleness})
    free = replace(now, kappa=0)
    return {
        "load": asdict(now.load),
        "gamma": now.gamma,
        "nodes": [asdict(one) for one in sorted(now.nodes, key=lambda one: (one.cost_per_group, one.name))],
        "plan": asdict(advise(now)),
        "least_staleness": least_staleness(now.load),
        "by_staleness": [
            asdict(advise(replace(free, load=replace(now.load, staleness=staleness)))) for staleness in bounds
        ],
        "sensitivity": {name: asdict(one) for name, one in sensitivity(now).items()},
    }


def text(found: dict[str, Any]) -> str:
    """The same in words."""
    load, nodes = found["load"], found["nodes"]
    rate = sum(one["rate"] for one in nodes)
    lines = [
        f"Measured: an update takes {load['train_s']:.4g} s, a broadcast {load['broadcast_s']:.4g} s, "
        f"a group {load['rollout_s']:.4g} s; {counted(len(nodes), 'node')} give {rate:.4g} groups/s together.",
        f"Cheapest nodes that give {found['gamma']:g} times the throughput that the learner needs:",
        "",
        f"{'':<36} {_HEADINGS}",
        f"{'as it is':<36} {_row(found['plan'])}",
        *(f"{name:<36} {_row(one)}" for name, one in found["sensitivity"].items()),
        "",
        f"{'S':<36} {_HEADINGS}",
        *(f"{one['staleness']:<36} {_row(one)}" for one in found["by_staleness"]),
    ]
    if found["plan"]["groups_per_s"] is None:
        lines += ["", f"No number of nodes is enough. Use S = {found['least_staleness']} or more."]
    return "\n".join(lines)


_HEADINGS = f"{'kappa':>5} {'needs/s':>9} {'gives/s':>9} {'nodes':>6} {'idle':>6} {'s/update':>9} {'cost/update':>11}"


def _row(one: dict[str, Any]) -> str:
    needs, step_s, cost = (
        "-" if one[name] is None else f"{one[name]:.4g}" for name in ("groups_per_s", "step_s", "cost_per_update")
    )
    gives, idle = f"{one['given_per_s']:.4g}", f"{one['idle']:.0%}"
    return f"{one['kappa']:>5} {needs:>9} {gives:>9} {one['nodes']:>6} {idle:>6} {step_s:>9} {cost:>11}"
