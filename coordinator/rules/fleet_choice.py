"""Which nodes work and which stand by: enough throughput for the learner, from those that give it at the least cost.

- A node's rate is what was *accepted* from it over the time it was at work, the newer the weightier; before there is
  any of that, a part of what it claims. Its cost is what it asks today.
- The pool shall give `target` groups a second; below `floor` the learner waits. Among nodes, the least cost per group
  comes first; for the last pick it is the least cost that closes the gap, and whom that makes superfluous stays out.
- What is missing is added: at once if the learner waits for it, otherwise when it has been missing for `window_s`.
- What costs too much is mended only when another set has been cheaper by `margin` for `window_s`; then whoever has
  worked, or has stood by, for less than `dwell_s` stays where it is. So it neither flaps nor starves.
- A node that falls silent works no more. Spending per second stays under its cap: the cap takes the dearest out, and
  the round is slower. Whoever is added leaves `margin` of it free, since costs are estimates.
- Pure: a decision is a new state with the reasons of every change in words. Times are seconds on any one clock; what a
  clock that was set back would put into the future began now.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

TRUST = 0.5
"""Which part of a claimed rate counts, until there is proof."""

PROOF_S = 60.0
"""A claim weighs as much as so many seconds of proven work."""


@dataclass(frozen=True)
class GroupRecord:
    """One group that was given to a node, and whether its answer was accepted."""

    begun_s: float
    ended_s: float
    accepted: bool


@dataclass(frozen=True)
class FleetCandidate:
    """A node that is alive, its rate in groups a second, and its cost a second while it works."""

    name: str
    rate: float
    cost: float

    @property
    def cost_per_group(self) -> float:
        """ρ."""
        return self.cost / self.rate if self.rate > 0 else math.inf


@dataclass(frozen=True)
class FleetRules:
    """How eagerly the fleet is changed."""

    window_s: float = 60.0
    margin: float = 0.1
    dwell_s: float = 300.0
    cost_cap: float = math.inf
    """Most that all working nodes together may cost a second."""


@dataclass(frozen=True)
class Need:
    """Groups a second: below `floor` the learner waits; the fleet is kept at `target`."""

    floor: float
    target: float


@dataclass(frozen=True)
class Change:
    """One node begins or ceases to work, and why."""

    name: str
    works: bool
    reason: str


@dataclass(frozen=True)
class Fleet:
    """Who works, since when everybody is where it is, and since when what has been wrong."""

    working: frozenset[str] = frozenset()
    since: Mapping[str, float] = field(default_factory=dict)
    short_since: float | None = None
    dear_since: float | None = None


def measured_rate(claimed: float, done: Iterable[GroupRecord], *, now_s: float, half_life_s: float) -> float:
    """Accepted groups a second of time at work, the newer the weightier, beginning with a part of the claim."""
    accepted, busy_s, busy_until = TRUST * claimed * PROOF_S, PROOF_S, -math.inf
    for work in sorted(done, key=lambda work: work.begun_s):
        weight = 0.5 ** (max(0.0, now_s - work.ended_s) / half_life_s)
        accepted += weight * work.accepted
        busy_s += weight * max(0.0, work.ended_s - max(work.begun_s, busy_until))
        busy_until = max(busy_until, work.ended_s)
    return accepted / busy_s


def cheapest_cover(candidates: Collection[FleetCandidate], target: float) -> list[FleetCandidate]:
    """Candidates that give the target at little cost; if all together do not, all that give anything."""
    order = sorted((one for one in candidates if one.rate > 0), key=_by_price)
    chosen: list[FleetCandidate] = []
    missing = target
    while order and missing > 0:
        chosen.append(order.pop(0))
        missing -= chosen[-1].rate
    if chosen and missing <= 0:
        last = chosen[-1]
        gap = missing + last.rate
        chosen[-1] = min((one for one in (last, *order) if one.rate >= gap), key=lambda one: (one.cost, one.name))
        _drop_superfluous(chosen, target)
    return chosen


def decide(
    fleet: Fleet, candidates: Sequence[FleetCandidate], need: Need, rules: FleetRules, *, now_s: float
) -> tuple[Fleet, list[Change]]:
    """The fleet as it shall be from now on, and what that changes."""
    known = {one.name: one for one in candidates}
    changes = [Change(name, False, "it fell silent") for name in sorted(fleet.working - set(known))]
    since = {name: min(now_s, fleet.since.get(name, -math.inf)) for name in known}
    fleet = replace(fleet, working=fleet.working & set(known), since=since)
    fleet, capped = _within_cap(fleet, known, rules, now_s)
    fleet, added = _fill(fleet, known, need, rules, now_s, lost=bool(changes))
    fleet, saved = _save(fleet, known, need, rules, now_s)
    return fleet, [*changes, *capped, *added, *saved]


def _within_cap(
    fleet: Fleet, known: Mapping[str, FleetCandidate], rules: FleetRules, now_s: float
) -> tuple[Fleet, list[Change]]:
    """Take the dearest out while all together cost more than may be spent."""
    changes = []
    working = sorted((known[name] for name in fleet.working), key=_by_price)
    while working and sum(one.cost for one in working) > rules.cost_cap:
        dearest = working.pop()
        changes.append(Change(dearest.name, False, "the budget per hour is reached, and it is the dearest"))
    return _changed(fleet, changes, now_s), changes


def _fill(
    fleet: Fleet, known: Mapping[str, FleetCandidate], need: Need, rules: FleetRules, now_s: float, *, lost: bool
) -> tuple[Fleet, list[Change]]:
    """Add what is missing, if it is missing long enough or the learner waits for it."""
    rate = sum(known[name].rate for name in fleet.working)
    if rate >= need.target:
        return replace(fleet, short_since=None), []
    begun_s = now_s if fleet.short_since is None else min(now_s, fleet.short_since)
    fleet = replace(fleet, short_since=begun_s)
    if rate >= need.floor and not lost and now_s - begun_s < rules.window_s:
        return fleet, []
    spare = rules.cost_cap / (1 + rules.margin) - sum(known[name].cost for name in fleet.working)
    affordable = [one for one in known.values() if one.name not in fleet.working and one.cost <= spare]
    gap = f"{rate:.3g} of {need.target:.3g} groups/s were there"
    everybody = "everybody is wanted" + (" whom the budget per hour allows" if rules.cost_cap < math.inf else "")
    why = f"{gap}, and it costs the least" if need.target < math.inf else everybody
    changes = []
    for one in sorted(cheapest_cover(affordable, need.target - rate), key=_by_price):
        if one.cost <= spare:
            spare -= one.cost
            changes.append(Change(one.name, True, why))
    return _changed(replace(fleet, short_since=None) if changes else fleet, changes, now_s), changes


def _save(
    fleet: Fleet, known: Mapping[str, FleetCandidate], need: Need, rules: FleetRules, now_s: float
) -> tuple[Fleet, list[Change]]:
    """Go over to a cheaper set, if there has been one by more than the margin for long enough."""
    working = [known[name] for name in fleet.working]
    ideal = cheapest_cover(known.values(), need.target)
    cost, least = sum(one.cost for one in working), sum(one.cost for one in ideal)
    enough = min(sum(one.rate for one in working), sum(one.rate for one in ideal)) >= need.target
    if not enough or cost <= least * (1 + rules.margin):
        return replace(fleet, dear_since=None), []
    begun_s = now_s if fleet.dear_since is None else min(now_s, fleet.dear_since)
    fleet = replace(fleet, dear_since=begun_s)
    if now_s - begun_s < rules.window_s:
        return fleet, []
    movable = {name for name, moved_s in fleet.since.items() if now_s - moved_s >= rules.dwell_s}
    entering = [one for one in ideal if one.name not in fleet.working and one.name in movable]
    leaving = [one for one in working if one not in ideal and one.name in movable]
    rate = sum(one.rate for one in (*working, *entering))
    released = []
    for one in sorted(leaving, key=_by_price, reverse=True):
        if rate - one.rate >= need.target:
            rate -= one.rate
            released.append(one)
    if not released or sum(one.cost for one in entering) >= sum(one.cost for one in released):
        return fleet, []
    changes = [Change(one.name, True, "it is cheaper than who worked") for one in sorted(entering, key=_by_price)]
    changes += [Change(one.name, False, f"{rate:.3g} groups/s are enough, and it is the dearest") for one in released]
    return _changed(replace(fleet, dear_since=None), changes, now_s), changes


def _changed(fleet: Fleet, changes: Sequence[Change], now_s: float) -> Fleet:
    enter = {change.name for change in changes if change.works}
    leave = {change.name for change in changes if not change.works}
    since = {**fleet.since, **dict.fromkeys(enter | leave, now_s)}
    return replace(fleet, working=(fleet.working | enter) - leave, since=since)


def _drop_superfluous(chosen: list[FleetCandidate], target: float) -> None:
    """Leave out, the dearest first, whom the last pick made unnecessary."""
    rate = sum(one.rate for one in chosen)
    for one in sorted(chosen, key=lambda one: (-one.cost, one.name)):
        if rate - one.rate >= target:
            rate -= one.rate
            chosen.remove(one)


def _by_price(one: FleetCandidate) -> tuple[float, str]:
    return one.cost_per_group, one.name
