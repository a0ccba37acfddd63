"""The needs and costs of a round for a bound S: κ, throughput, nodes, broadcast time and price per update; pure.

- T_bcast is given, or it is the fluid bound of `topology` for the given links plus the time to load a version.
- All nodes are alike, and there are as many as give γ times the least throughput. More nodes may take longer to reach,
  so the number of nodes and T_bcast are computed together.
- A sensitivity is the same plan with one input a quarter larger.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from coordinator.config.round import ModeName
from coordinator.rules.capacity import OVERLAP, VISIBLE, PoolLoad, least_staleness, staleness_bound
from coordinator.rules.topology import NodeLinks, fluid_bound_s
from protocol.limits import HOUR_S
from protocol.text.plain import counted

RULES = {"visible": VISIBLE, "overlap": OVERLAP}

NODES_MAX = 100_000
"""A plan that needs more nodes is infeasible."""

LARGER = 1.25
"""The factor of a sensitivity."""

STALENESS_SHOWN = (0, 1, 2, 3, 4, 6, 8, 11)

BYTES_PER_MBIT = 1e6 / 8

RuleName = Literal["visible", "overlap"]


@dataclass(frozen=True)
class Inputs:
    """The measured or assumed inputs of a plan."""

    staleness: int
    groups_per_update: int
    train_s: float
    group_s: float
    """The time in which a node samples one group, when it samples `at_once` groups together."""
    at_once: int = 1
    size_mb: float = 0.0
    """Size of a published version, in MB."""
    source_mbit: float = 1000.0
    node_mbit: float = 100.0
    node_up_mbit: float = 100.0
    load_s: float = 0.0
    """The time from the last byte to the first token."""
    broadcast_s: float | None = None
    """T_bcast, if it was measured: then `size_mb`, the links and `load_s` are not used."""
    node_price_per_hour: float = 0.0
    learner_price_per_hour: float = 0.0
    gamma: float = 1.1
    kappa: int = 0
    """Updates between publications; 0 uses the rule's advice."""

    @property
    def node_rate(self) -> float:
        return self.at_once / self.group_s

    def arrival_s(self, nodes: int) -> float:
        """Return T_bcast to `nodes` nodes."""
        if self.broadcast_s is not None:
            return self.broadcast_s
        if not self.size_mb:
            return self.load_s
        link = NodeLinks("", up=self.node_up_mbit * BYTES_PER_MBIT, down=self.node_mbit * BYTES_PER_MBIT)
        links = [link] * max(1, nodes)
        return fluid_bound_s(self.size_mb * 1e6, self.source_mbit * BYTES_PER_MBIT, links) + self.load_s

    def load(self, nodes: int) -> PoolLoad:
        return PoolLoad(self.staleness, self.groups_per_update, self.train_s, self.arrival_s(nodes), self.group_s)


@dataclass(frozen=True)
class PoolPlan:
    """The needs of a rule for one S; `nodes` is None if no number of nodes would keep the learner busy."""

    rule: RuleName
    staleness: int
    kappa: int
    age_max: int
    broadcast_s: float
    groups_per_s: float | None
    nodes: int | None
    cost_per_update: float | None


def plan(inputs: Inputs, rule: RuleName = "visible") -> PoolPlan:
    """Return the smallest pool of such nodes that keeps the learner busy, with γ as the reserve."""
    nodes = 1
    while True:
        load = inputs.load(nodes)
        kappa = inputs.kappa or RULES[rule].kappa(load)
        least = RULES[rule].min_rate(load, kappa)
        wanted = inputs.gamma * least / inputs.node_rate
        feasible = wanted <= NODES_MAX
        if not feasible or nodes >= wanted * (1 - 1e-9):
            break
        nodes = max(nodes + 1, math.ceil(wanted * (1 - 1e-9)))
    hourly = inputs.learner_price_per_hour + nodes * inputs.node_price_per_hour
    return PoolPlan(
        rule=rule,
        staleness=inputs.staleness,
        kappa=kappa,
        age_max=inputs.staleness if rule == "visible" else staleness_bound(load, kappa),
        broadcast_s=load.broadcast_s,
        groups_per_s=least if feasible else None,
        nodes=nodes if feasible else None,
        cost_per_update=hourly * inputs.train_s / HOUR_S if feasible else None,
    )


def bubble(inputs: Inputs, nodes: int, rule: RuleName = "visible") -> float:
    """Return the share of its time that the learner would wait with `nodes` nodes."""
    load = inputs.load(nodes)
    return RULES[rule].bubble(load, inputs.kappa or RULES[rule].kappa(load), nodes * inputs.node_rate)


def sensitivity(inputs: Inputs) -> dict[str, PoolPlan]:
    """Return the plan with one quantity a quarter larger, by the name of the quantity; and with S one larger."""
    changes: dict[str, dict[str, Any]] = {
        "an update takes longer": {"train_s": LARGER * inputs.train_s},
        "groups take longer": {"group_s": LARGER * inputs.group_s},
        "nodes are dearer": {"node_price_per_hour": LARGER * inputs.node_price_per_hour},
        "the learner is dearer": {"learner_price_per_hour": LARGER * inputs.learner_price_per_hour},
    }
    if inputs.broadcast_s is not None:
        changes["a broadcast takes longer"] = {"broadcast_s": LARGER * inputs.broadcast_s}
    elif inputs.size_mb:
        changes["versions are larger"] = {"size_mb": LARGER * inputs.size_mb}
        changes["the source's uplink is faster"] = {"source_mbit": LARGER * inputs.source_mbit}
        changes["nodes' links are faster"] = {
            "node_mbit": LARGER * inputs.node_mbit,
            "node_up_mbit": LARGER * inputs.node_up_mbit,
        }
    changed = {f"{name} by {LARGER - 1:.0%}": plan(replace(inputs, **change)) for name, change in changes.items()}
    return {**changed, "S is one larger": plan(replace(inputs, staleness=inputs.staleness + 1))}


@dataclass(frozen=True)
class Way:
    """The speed and cost of one mode of a round with a given pool."""

    mode: ModeName
    nodes: int
    step_s: float
    idle: float
    age_max: int
    in_vain: float
    """The largest share of the samples that is wasted: that of a pool that never pauses."""
    cost_per_update: float


def ways(inputs: Inputs, nodes: int) -> list[Way]:
    """Return all modes for the same nodes; `colocated` has one such node on the learner's own device."""
    load, rate = inputs.load(nodes), nodes * inputs.node_rate
    kappa = inputs.kappa or VISIBLE.kappa(load)
    in_turns = replace(load, staleness=0)
    # On one machine nothing travels.
    at_home = replace(in_turns, broadcast_s=inputs.load_s)
    step_s = VISIBLE.period_s(load, kappa, rate) / kappa
    in_vain = max(0.0, 1.0 - inputs.groups_per_update / (rate * step_s))
    return [
        _way(inputs, "echo2", nodes, step_s, inputs.staleness, 0.0),
        _way(inputs, "push-pull", nodes, step_s, inputs.staleness, in_vain),
        _way(inputs, "sequential", nodes, VISIBLE.period_s(in_turns, 1, rate), 0, 0.0),
        _way(inputs, "colocated", 0, VISIBLE.period_s(at_home, 1, inputs.node_rate), 0, 0.0),
    ]


def _way(inputs: Inputs, mode: ModeName, nodes: int, step_s: float, age_max: int, in_vain: float) -> Way:
    hourly = inputs.learner_price_per_hour + nodes * inputs.node_price_per_hour
    return Way(mode, nodes, step_s, 1 - inputs.train_s / step_s, age_max, in_vain, hourly * step_s / HOUR_S)


def report(inputs: Inputs, nodes: int | None) -> dict[str, Any]:
    """Return all results at once, for scripts."""
    plans = {rule: asdict(plan(inputs, rule)) for rule in ("visible", "overlap")}
    shown = sorted({*STALENESS_SHOWN, inputs.staleness})
    free = replace(inputs, kappa=0)
    return {
        "inputs": asdict(inputs),
        "plan": plans,
        "least_staleness": least_staleness(inputs.load(plans["visible"]["nodes"] or 1)),
        "by_staleness": [asdict(plan(replace(free, staleness=bound))) for bound in shown],
        "sensitivity": {name: asdict(changed_plan) for name, changed_plan in sensitivity(inputs).items()},
        "modes": [asdict(way) for way in ways(inputs, max(1, nodes or plans["visible"]["nodes"] or 1))],
        "bubble": {"nodes": nodes, "share": bubble(inputs, nodes)} if nodes is not None else None,
    }


def text(found: dict[str, Any]) -> str:
    """Return the report `found` as text."""
    inputs, visible = found["inputs"], found["plan"]["visible"]
    is_priced = bool(inputs["node_price_per_hour"] or inputs["learner_price_per_hour"])
    lines = [
        f"S = {inputs['staleness']}, {inputs['groups_per_update']} groups per update, an update every "
        f"{inputs['train_s']:.4g} s, {visible['broadcast_s']:.4g} s from publication to a node's first token",
        "",
        f"{'rule':<10} {_HEADINGS}",
        *(f"{name:<10} {_row(row, is_priced)}" for name, row in found["plan"].items()),
        "",
        f"{'S':<10} {_HEADINGS}",
        *(f"{row['staleness']:<10} {_row(row, is_priced)}" for row in found["by_staleness"]),
        "",
        f"{'if':<36} {_HEADINGS}",
        *(f"{name:<36} {_row(row, is_priced)}" for name, row in found["sensitivity"].items()),
        "",
    ]
    lines += [
        f"{'mode':<10} {'nodes':>6} {'s/update':>9} {'idle':>6} {'oldest':>6} {'wasted':>8} {'cost/update':>11}",
        *(
            f"{way['mode']:<10} {way['nodes'] or 'one':>6} {way['step_s']:>9.4g} {way['idle']:>6.1%} "
            f"{way['age_max']:>6} {way['in_vain']:>8.0%} {_cost(way, is_priced)}"
            for way in found["modes"]
        ),
        "",
    ]
    if visible["nodes"] is None:
        lines.append(f"No number of nodes is enough. Use S = {found['least_staleness']} or more.")
    if found["bubble"]:
        nodes = found["bubble"]["nodes"]
        lines.append(f"With {counted(nodes, 'node')} the learner waits {found['bubble']['share']:.1%}.")
    if not is_priced:
        lines.append("For the cost of an update, give --node-price and --learner-price (per hour).")
    return "\n".join(lines).rstrip()


_HEADINGS = f"{'kappa':>5} {'oldest':>6} {'T_bcast s':>9} {'groups/s':>9} {'nodes':>6} {'cost/update':>11}"


def _cost(row: dict[str, Any], is_priced: bool) -> str:
    return f"{row['cost_per_update']:>11.4g}" if is_priced else f"{'-':>11}"


def _row(row: dict[str, Any], is_priced: bool) -> str:
    head = f"{row['kappa']:>5} {row['age_max']:>6} {row['broadcast_s']:>9.4g} "
    if row["nodes"] is None:
        return head + "no number of nodes is enough"
    return head + f"{row['groups_per_s']:>9.4g} {row['nodes']:>6} {_cost(row, is_priced)}"
