"""Audits of simulated claims, by the real trust: which are looked at, what a verdict does, who is banned."""

from dataclasses import replace
from random import Random

from coordinator.audit import trust
from coordinator.audit.trust import TrustRules
from coordinator.sim.machines import SimulatedNode
from ledger.drawing import ALL_PPM


def is_drawn(node: SimulatedNode, rules: TrustRules, chance: Random) -> bool:
    """Whether this claim of the node is audited."""
    node.standing = replace(node.standing, claims=node.standing.claims + 1)
    return chance.random() * ALL_PPM < trust.rate_ppm(node.standing, rules)


def judge(node: SimulatedNode, rules: TrustRules, *, forged: bool) -> bool:
    """A verdict comes; whether the node is banned by it."""
    if node.banned:
        return False
    node.standing = trust.found(node.standing, "hard" if forged else "pass", rules)
    node.banned = trust.level(node.standing, rules) == "banned"
    return node.banned
