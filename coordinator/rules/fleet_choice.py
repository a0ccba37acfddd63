"""The choice of the nodes that work and of those on standby: enough throughput for the learner at the least cost.

- A node's rate is the number of its *accepted* groups over its time at work, with more weight on newer ones; before it
  has any, a part of its claimed rate. Its cost comes from its present price.
- The pool must give `target` groups per second; below `floor` the learner waits. The nodes with the least cost per
  group are chosen first; the last choice is the cheapest node that closes the gap, and nodes that it makes superfluous
  are left out.
- Missing throughput is added: at once if the learner waits for it, otherwise when it has been missing for `window_s`.
- Nodes that cost too much are replaced only when another set has been cheaper by `margin` for `window_s`. Nodes that
  have worked, or have been on standby, for less than `dwell_s` do not change. So no node flaps or starves.
- A node that goes offline stops working. Spending per second stays under its cap: the cap removes the dearest nodes,
  and the round is slower. Nodes that are added leave `margin` of the cap free, since costs are estimates.
- Pure: a decision is a new state with the reason of every change in words. Times are seconds on any one clock; if a
  clock was set back, a time in the future counts as now.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

TRUST = 0.5
"""The part of a claimed rate that counts until the node has proven its rate."""

PROOF_S = 60.0
"""The weight of a claimed rate, in seconds of proven work."""


@dataclass(frozen=True)
class GroupRecord:
    """A group that was given to a node, and whether its answer was accepted."""

    begun_s: float
    ended_s: float
    accepted: bool


@dataclass(frozen=True)
class FleetCandidate:
    """A live node, its rate in groups per second, and its cost per second while it works."""

    name: str
    rate: float
    cost: float

    @property
    def cost_per_group(self) -> float:
        """Return ρ, the cost of one group."""
        return self.cost / self.rate if self.rate > 0 else math.inf


@dataclass(frozen=True)
class FleetRules:
    """The rules that decide how fast the fleet is changed."""

    window_s: float = 60.0
    margin: float = 0.1
    dwell_s: float = 300.0
    cost_cap: float = math.inf
    """The most that all working nodes together may cost per second."""


@dataclass(frozen=True)
class Need:
    """The throughput needed, in groups per second: below `floor` the learner waits; the fleet is kept at `target`."""

    floor: float
    target: float


@dataclass(frozen=True)
class Change:
    """A node that begins or stops working, and the reason."""

    name: str
    works: bool
    reason: str


@dataclass(frozen=True)
class Fleet:
    """The nodes at work, since when each node is in its state, and since when the fleet is too small or too dear."""

    working: frozenset[str] = frozenset()
    since: Mapping[str, float] = field(default_factory=dict)
    short_since: float | None = None
    dear_since: float | None = None


def measured_rate(claimed: float, done: Iterable[GroupRecord], *, now_s: float, half_life_s: float) -> float:
    """Return accepted groups per second at work, with more weight on newer ones, from a part of `claimed` on."""
    accepted, busy_s, busy_until = TRUST * claimed * PROOF_S, PROOF_S, -math.inf
    for work in sorted(done, key=lambda work: work.begun_s):
        weight = 0.5 ** (max(0.0, now_s - work.ended_s) / half_life_s)
        accepted += weight * work.accepted
        busy_s += weight * max(0.0, work.ended_s - max(work.begun_s, busy_until))
        busy_until = max(busy_until, work.ended_s)
    return accepted / busy_s


def cheapest_cover(candidates: Collection[FleetCandidate], target: float) -> list[FleetCandidate]:
    """Return candidates that give `target` at little cost; if all together do not, all with a rate above 0."""
    order = sorted((node for node in candidates if node.rate > 0), key=_by_price)
    chosen: list[FleetCandidate] = []
    missing = target
    while order and missing > 0:
        chosen.append(order.pop(0))
        missing -= chosen[-1].rate
    if chosen and missing <= 0:
        last = chosen[-1]
        gap = missing + last.rate
        chosen[-1] = min((node for node in (last, *order) if node.rate >= gap), key=lambda node: (node.cost, node.name))
        _drop_superfluous(chosen, target)
    return chosen


def decide(
    fleet: Fleet, candidates: Sequence[FleetCandidate], need: Need, rules: FleetRules, *, now_s: float
) -> tuple[Fleet, list[Change]]:
    """Return the fleet from now on, and the changes."""
    known = {node.name: node for node in candidates}
    changes = [Change(name, False, "it went offline") for name in sorted(fleet.working - set(known))]
    since = {name: min(now_s, fleet.since.get(name, -math.inf)) for name in known}
    fleet = replace(fleet, working=fleet.working & set(known), since=since)
    fleet, capped = _within_cap(fleet, known, rules, now_s)
    fleet, added = _fill(fleet, known, need, rules, now_s, lost=bool(changes))
    fleet, saved = _save(fleet, known, need, rules, now_s)
    return fleet, [*changes, *capped, *added, *saved]


def _within_cap(
    fleet: Fleet, known: Mapping[str, FleetCandidate], rules: FleetRules, now_s: float
) -> tuple[Fleet, list[Change]]:
    """Remove the dearest nodes while all together cost more than the cap."""
    changes = []
    working = sorted((known[name] for name in fleet.working), key=_by_price)
    while working and _cost(working) > rules.cost_cap:
        dearest = working.pop()
        changes.append(Change(dearest.name, False, "the hourly budget is reached, and it is the dearest node"))
    return _changed(fleet, changes, now_s), changes


def _fill(
    fleet: Fleet, known: Mapping[str, FleetCandidate], need: Need, rules: FleetRules, now_s: float, *, lost: bool
) -> tuple[Fleet, list[Change]]:
    """Add nodes if throughput has been missing for long enough, or if the learner waits for it."""
    rate = _rate(known[name] for name in fleet.working)
    if rate >= need.target:
        return replace(fleet, short_since=None), []
    begun_s = now_s if fleet.short_since is None else min(now_s, fleet.short_since)
    fleet = replace(fleet, short_since=begun_s)
    if rate >= need.floor and not lost and now_s - begun_s < rules.window_s:
        return fleet, []
    spare = rules.cost_cap / (1 + rules.margin) - _cost(known[name] for name in fleet.working)
    affordable = [node for node in known.values() if node.name not in fleet.working and node.cost <= spare]
    gap = f"the fleet gave {rate:.3g} of {need.target:.3g} groups/s"
    everybody = "all nodes are wanted" + (" that the hourly budget allows" if rules.cost_cap < math.inf else "")
    why = f"{gap}, and this node costs the least" if need.target < math.inf else everybody
    changes = []
    for node in sorted(cheapest_cover(affordable, need.target - rate), key=_by_price):
        if node.cost <= spare:
            spare -= node.cost
            changes.append(Change(node.name, True, why))
    return _changed(replace(fleet, short_since=None) if changes else fleet, changes, now_s), changes


def _save(
    fleet: Fleet, known: Mapping[str, FleetCandidate], need: Need, rules: FleetRules, now_s: float
) -> tuple[Fleet, list[Change]]:
    """Change to a cheaper set, if there has been one, cheaper by more than the margin, for long enough."""
    working = [known[name] for name in fleet.working]
    ideal = cheapest_cover(known.values(), need.target)
    both_suffice = min(_rate(working), _rate(ideal)) >= need.target
    if not both_suffice or _cost(working) <= _cost(ideal) * (1 + rules.margin):
        return replace(fleet, dear_since=None), []
    begun_s = now_s if fleet.dear_since is None else min(now_s, fleet.dear_since)
    fleet = replace(fleet, dear_since=begun_s)
    if now_s - begun_s < rules.window_s:
        return fleet, []
    movable = {name for name, moved_s in fleet.since.items() if now_s - moved_s >= rules.dwell_s}
    entering = [node for node in ideal if node.name not in fleet.working and node.name in movable]
    leaving = [node for node in working if node not in ideal and node.name in movable]
    released, rate = _superfluous(leaving, _rate([*working, *entering]), need.target)
    if not released or _cost(entering) >= _cost(released):
        return fleet, []
    changes = [
        Change(node.name, True, "it is cheaper than the nodes at work") for node in sorted(entering, key=_by_price)
    ]
    changes += [
        Change(node.name, False, f"{rate:.3g} groups/s are enough, and it is the dearest node") for node in released
    ]
    return _changed(replace(fleet, dear_since=None), changes, now_s), changes


def _superfluous(leaving: Iterable[FleetCandidate], rate: float, target: float) -> tuple[list[FleetCandidate], float]:
    """Return those of `leaving` without whom a fleet of `rate` still gives `target`, and the rate without them."""
    released = []
    for node in sorted(leaving, key=_by_price, reverse=True):
        if rate - node.rate >= target:
            rate -= node.rate
            released.append(node)
    return released, rate


def _rate(nodes: Iterable[FleetCandidate]) -> float:
    return sum(node.rate for node in nodes)


def _cost(nodes: Iterable[FleetCandidate]) -> float:
    return sum(node.cost for node in nodes)


def _changed(fleet: Fleet, changes: Sequence[Change], now_s: float) -> Fleet:
    enter = {change.name for change in changes if change.works}
    leave = {change.name for change in changes if not change.works}
    since = {**fleet.since, **dict.fromkeys(enter | leave, now_s)}
    return replace(fleet, working=(fleet.working | enter) - leave, since=since)


def _drop_superfluous(chosen: list[FleetCandidate], target: float) -> None:
    """Remove the nodes that the last choice made unnecessary, the dearest first."""
    rate = _rate(chosen)
    for node in sorted(chosen, key=lambda node: (-node.cost, node.name)):
        if rate - node.rate >= target:
            rate -= node.rate
            chosen.remove(node)


def _by_price(node: FleetCandidate) -> tuple[float, str]:
    return node.cost_per_group, node.name
