"""Gain from patience by the rules of trust alone: many owners, no model, no store.

- An owner works until its plan says forge. Forgeries that are drawn are found; the others are paid when their window
  has closed, or at the end.
- The gain is counted as in `tests.adversaries.campaign`: paid for forgeries, less voided of honest work, the pledge
  included.
- Owners know nothing of each other, so what a hundred identities gain is a hundred times what one does: any gain at
  all would be worth a crowd of them.
- The arena plays the same with everything real, for a few secrets; its gains are mostly chance, these are not.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, stdev

from coordinator.config import AuditSection
from coordinator.rules import trust
from coordinator.rules.trust import OwnerStanding
from ledger.drawing import ALL_PPM

HONEST_MICROS = 1_000
"""The pay of an honest group; a plan may forge dearer ones."""

Plan = Callable[[int, OwnerStanding, int], int]
"""A plan: from groups so far, the standing, and what the window holds, to the worth of a forgery; 0 is honest work."""


@dataclass(frozen=True)
class Gain:
    """The gain of many owners, in payments for one honest group."""

    mean: float
    standard_error: float


def all_after(groups: int, times: int = 1) -> Plan:
    """Work so long, then only forge, each so many times as dear."""
    return lambda done, _standing, _held: times * HONEST_MICROS if done >= groups else 0


def one_in(many: int, after: int, times: int = 1) -> Plan:
    return lambda done, _standing, _held: times * HONEST_MICROS if done >= after and done % many == 0 else 0


def when_trusted(rules: AuditSection) -> Plan:
    """Forge from the moment that the rate falls to its least, while the escrow is still that of before."""
    return lambda _done, standing, _held: HONEST_MICROS if standing.groups >= rules.trusted_groups else 0


def when_nothing_is_held(rules: AuditSection, times: int) -> Plan:
    """Forge as soon as not everything is audited, and whenever there is no window to lose."""

    def plan(_done: int, standing: OwnerStanding, held: int) -> int:
        return times * HONEST_MICROS if not held and trust.rate_ppm(standing, rules) < ALL_PPM else 0

    return plan


PLANS: dict[str, Plan] = {
    "200 honest groups, then only forgeries": all_after(200),
    "200 honest groups, then one forgery in 20": one_in(20, 200),
    "200 honest groups, then forgeries at four times the length": all_after(200, 4),
    "200 honest groups, then one in 50 at four times the length": one_in(50, 200, 4),
    "forgeries from the day that the least is audited": when_trusted(AuditSection()),
    "forgeries whenever no window is there to lose": when_nothing_is_held(AuditSection(), 1),
    "the same, of 4 times the length": when_nothing_is_held(AuditSection(), 4),
    "the same, of 64 times the length": when_nothing_is_held(AuditSection(), 64),
}


Load = Callable[[int], float]
"""A load: from groups so far to how far rates are eased, since auditors are behind."""


def gain(
    plan: Plan,
    *,
    owners: int,
    groups: int,
    rules: AuditSection,
    seed: int = 0,
    forfeits: bool = True,
    load: Load = lambda _done: 0.0,
) -> Gain:
    """Return the gain of `owners` that follow a plan; without `forfeits`, a fault takes neither window nor pledge."""
    chance = random.Random(seed)
    gains = [_play(plan, groups, rules, chance, forfeits, load) / HONEST_MICROS for _ in range(owners)]
    return Gain(mean(gains), stdev(gains) / owners**0.5)


def _play(plan: Plan, groups: int, rules: AuditSection, chance: random.Random, forfeits: bool, load: Load) -> int:
    """Return one owner's gain; forgeries have positive numbers in the escrow, honest groups negative ones."""
    standing, escrow, gained, pledge = OwnerStanding(), deque[int](), 0, 0
    rates = deque[int]()  # at which each of the escrow was drawn
    for done in range(groups):
        held = sum(map(abs, escrow))
        forged = plan(done, standing, held)
        worth = forged or HONEST_MICROS
        rate = trust.rate_ppm(standing, rules, worth_micros=worth, held_micros=held + pledge, ease=load(done))
        window = trust.window(standing, rules, drawn_ppm=min(rates, default=ALL_PPM))
        standing = OwnerStanding(standing.claims + 1, standing.groups, standing.soft, standing.hard)
        if chance.random() * ALL_PPM >= rate:
            escrow.append(forged or -HONEST_MICROS)
            rates.append(rate)
        elif not forged:
            standing, pledge = trust.after_verdict(standing, "pass", rules), HONEST_MICROS
        else:
            standing = trust.after_verdict(standing, "hard", rules)
            gained += sum(micros for micros in escrow if micros < 0) - pledge if forfeits else 0
            pledge = 0
            escrow.clear()
            rates.clear()
            if trust.level(standing, rules) == "banned":
                return gained
        while len(escrow) > window:
            gained += max(0, escrow.popleft())
            rates.popleft()
            standing = trust.validated(standing, rules)
    return gained + sum(micros for micros in escrow if micros > 0)
